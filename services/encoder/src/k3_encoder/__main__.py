"""`python -m k3_encoder` runs an encoder."""

from k3_encoder.main import main

if __name__ == "__main__":
    main()
