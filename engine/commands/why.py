NAME="why"; HELP=""; DESCRIPTION=""; EXAMPLE=""
def add_arguments(parser): pass
def execute(args): return 0
