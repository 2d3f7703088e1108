"""`python -m k3_fetcher` runs a fetcher."""

from k3_fetcher.main import main

if __name__ == "__main__":
    main()
