"""The command ``nonlocal`` as ``python -m nlflow``, where scripts are not on the path."""

from nlflow.desk import main

if __name__ == "__main__":
    main()
