"""`python -m k3_gateway` runs the gateway."""

from k3_gateway.main import main

if __name__ == "__main__":
    main()
