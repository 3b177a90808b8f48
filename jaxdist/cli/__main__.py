from jaxdist.cli import main

main()
