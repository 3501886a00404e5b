def pytest_addoption(parser):
    parser.addoption(
        "--write-table",
        action="store_true",
        help="put what the tests of tests/faults measure into docs/reliability.md",
    )
