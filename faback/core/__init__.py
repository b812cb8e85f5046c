"""The core: data, contracts, plugins, selection and the facade. Names no mode and no kernel."""
