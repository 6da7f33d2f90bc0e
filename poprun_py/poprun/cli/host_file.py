"""A file of hosts, one on each line, in range notation if need be; what follows a # counts for nothing."""

from poprun.errors import PlanError, UsageError
from poprun.text.host_names import check_hosts, parse_hosts


def read_host_file(path: str) -> tuple[str, ...]:
    """The hosts that the file at ``path`` names, in its order.

    Raises:
        UsageError: If it cannot be read, or names none; or a line is no host, by its number.
        PlanError: If a host comes twice.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    hosts: list[str] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        try:
            hosts.extend(parse_hosts(text) if text else ())
        except PlanError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host: write one on each line")
    check_hosts(hosts)
    return tuple(hosts)
