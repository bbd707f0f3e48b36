"""The statements of the theory as programs that are run and can fail: one file for each in `validation.claims`."""
