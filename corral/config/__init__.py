"""All settings of a run: defaults, presets, YAML files, overrides."""
