"""How strong the tests are: small wrong changes of the numerical code that they have to notice; see `__main__`."""
