"""`python -m w3pack`"""

from w3pack.cli.app import main

main()
