"""The Landlock supervisor: a program of its own that confines one command and cleans up after it.

Started as ``python -I -S -E supervisor.py POLICY STATUS -- argv``, both descriptors. POLICY holds pairs of
NUL-terminated fields, see ``landlock.py``. The byte ``s`` in STATUS means that every restriction
was in force and the command was started. ``supervisor.py serve SOCKET`` is the fork server: it starts such a
supervisor for each request by forking itself, which saves the start of Python, see ``forkserver.py``. Standard
library only, and little of it.

Invariants: only the forked child is restricted, so the supervisor can always signal it; whatever
the child leaves behind is reparented here and killed before the supervisor exits; when the runner
dies the same happens. Exit code: the command's, or 128 plus the number of the signal that ended it.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    import socket
    from collections.abc import Iterable, Iterator
    from typing import NoReturn

SETUP_FAILED = 125
"""Exit code when the command was not started."""

MINIMUM_ABI = 3
"""Below it truncation cannot be denied."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522
_DAC_OVERRIDE = 1
_FOWNER = 3
_SIGKILL = 9
_SIGPIPE = 13
_SIGTERM = 15
_SIGXFSZ = 25
_SIG_BLOCK = 0
_SIG_SETMASK = 2

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_RULE_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_DIR = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_CHAR = 1 << 6
_MAKE_DIR = 1 << 7
_MAKE_REG = 1 << 8
_MAKE_SOCK = 1 << 9
_MAKE_FIFO = 1 << 10
_MAKE_BLOCK = 1 << 11
_MAKE_SYM = 1 << 12
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15

_READ = _EXECUTE | _READ_FILE
_CHANGE = (
    _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_SOCK
    | _MAKE_FIFO
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_DEVICES = (b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom")

_NET_BIND_AND_CONNECT = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_CLEANUP_SECONDS = 10.0
_REQUEST_DESCRIPTORS = 6


class SetupError(Exception):
    """The command cannot be confined, so it is not started."""


def _libc() -> ctypes.CDLL:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _call(what: str, result: int) -> int:
    import ctypes

    if result < 0:
        number = ctypes.get_errno()
        raise SetupError(f"{what}: {os.strerror(number)}")
    return result


def landlock_abi() -> tuple[int, int]:
    """The kernel's Landlock ABI and 0, or 0 and the error number that says why there is none."""
    import ctypes

    libc = _libc()
    version = libc.syscall(
        ctypes.c_long(_CREATE_RULESET), ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint32(1)
    )
    return (int(version), 0) if version > 0 else (0, ctypes.get_errno() or errno.EINVAL)


class _Ruleset:
    """A Landlock ruleset under construction. What it handles and no rule grants is denied."""

    def __init__(self, abi: int, *, network: bool) -> None:
        import ctypes

        self._libc = _libc()
        self._ctypes = ctypes
        self._handled = (_TRUNCATE << 1) - 1
        if abi >= 5:
            self._handled |= _IOCTL_DEV
        handled_network = 0 if network or abi < 4 else _NET_BIND_AND_CONNECT
        scoped = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0
        size = 24 if abi >= 6 else 16 if abi >= 4 else 8
        attributes = (ctypes.c_uint64 * 3)(self._handled, handled_network, scoped)
        self._descriptor = _call(
            "landlock_create_ruleset",
            self._libc.syscall(
                ctypes.c_long(_CREATE_RULESET), ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0)
            ),
        )

    def grant(self, descriptor: int, access: int) -> None:
        """Grant ``access`` on an opened path and below it. A symbolic link gets nothing."""
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            return
        if not stat.S_ISDIR(mode):
            access &= _ON_FILES
        # struct landlock_path_beneath_attr is packed: 64 bits of rights, 32 bits of descriptor.
        rule = (self._ctypes.c_uint32 * 3)(access & 0xFFFFFFFF & self._handled, 0, descriptor)
        _call(
            "landlock_add_rule",
            self._libc.syscall(
                self._ctypes.c_long(_ADD_RULE),
                self._ctypes.c_int(self._descriptor),
                self._ctypes.c_int(_RULE_PATH_BENEATH),
                self._ctypes.byref(rule),
                self._ctypes.c_uint32(0),
            ),
        )

    def enforce(self) -> None:
        """Restrict this process and its children, for good."""
        result = self._libc.syscall(
            self._ctypes.c_long(_RESTRICT_SELF), self._ctypes.c_int(self._descriptor), self._ctypes.c_uint32(0)
        )
        _call("landlock_restrict_self", result)


def _open_path(path: bytes) -> int:
    """Open an absolute path component by component; none of them may be a symbolic link."""
    folder = os.open(b"/", _OPEN)
    for name in path.split(b"/"):
        if name:
            try:
                following = os.open(name, _OPEN, dir_fd=folder)
            finally:
                os.close(folder)
            folder = following
            if stat.S_ISLNK(os.fstat(folder).st_mode):
                raise SetupError(f"{os.fsdecode(path)}: a symbolic link leads to it")
    return folder


def _entries(folder: int) -> list[bytes]:
    try:
        readable = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        # What cannot be listed cannot be granted entry by entry, so nothing in it is granted.
        return []
    try:
        return [os.fsencode(name) for name in os.listdir(readable)]
    finally:
        os.close(readable)


class _Exceptions:
    """Paths to be left out of what is granted, known by identity: a folder can be mounted in two places."""

    def __init__(self, paths: Iterable[bytes]) -> None:
        self._above: set[tuple[int, int]] = set()
        self._paths: set[tuple[int, int]] = set()
        for path in paths:
            self._add(path)

    def _add(self, path: bytes) -> None:
        folder = os.open(b"/", _OPEN)
        try:
            for name in path.split(b"/"):
                if name:
                    self._above.add(_identity(folder))
                    following = os.open(name, _OPEN, dir_fd=folder)
                    os.close(folder)
                    folder = following
            self._paths.add(_identity(folder))
        except FileNotFoundError:
            pass  # what is not there needs no exception
        finally:
            os.close(folder)

    def grant(self, ruleset: _Ruleset, descriptor: int, access: int) -> None:
        """Grant ``access`` on an opened path and below it, except for these paths and what is below them."""
        identity = _identity(descriptor)
        if identity in self._paths:
            return
        if identity not in self._above:
            ruleset.grant(descriptor, access)
            return
        for name in _entries(descriptor):
            try:
                child = os.open(name, _OPEN, dir_fd=descriptor)
            except OSError:
                continue  # it vanished since it was listed
            try:
                self.grant(ruleset, child, access)
            finally:
                os.close(child)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class _Policy:
    """The parsed policy: repeated fields by name."""

    def __init__(self, content: bytes) -> None:
        fields = content.split(b"\0")[:-1]
        self._values: dict[bytes, list[bytes]] = {}
        for name, value in zip(fields[::2], fields[1::2], strict=True):
            self._values.setdefault(name, []).append(value)

    def all(self, name: bytes) -> list[bytes]:
        return self._values.get(name, [])

    def one(self, name: bytes) -> bytes:
        values = self.all(name)
        if len(values) != 1:
            raise SetupError(f"the policy has {len(values)} fields {name.decode()}")
        return values[0]

    def number(self, name: bytes) -> int:
        return int(self.one(name))

    def flag(self, name: bytes) -> bool:
        return self.one(name) == b"1"


def _each_opened(paths: list[bytes]) -> Iterator[int]:
    for path in paths:
        descriptor = _open_path(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _existing(*paths: bytes) -> list[bytes]:
    """The canonical paths of those that this system has."""
    return [os.path.realpath(path) for path in paths if os.path.exists(path)]


def _build_ruleset(policy: _Policy) -> _Ruleset:
    abi, why = landlock_abi()
    if abi < MINIMUM_ABI:
        raise SetupError(f"Landlock ABI {abi}, {MINIMUM_ABI} is needed ({os.strerror(why)})")
    ruleset = _Ruleset(abi, network=policy.flag(b"network"))
    roots = policy.all(b"root")
    hidden = _Exceptions(policy.all(b"hidden"))
    for folder in _each_opened([b"/"]):
        ruleset.grant(folder, _READ_DIR)
        _Exceptions([*policy.all(b"hidden"), b"/dev"]).grant(ruleset, folder, _READ)
    for folder in _each_opened([*roots, *policy.all(b"readable")]):
        hidden.grant(ruleset, folder, _READ)
    for device in _each_opened(_existing(*_DEVICES)):
        ruleset.grant(device, _READ | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV)
    if policy.flag(b"shared-memory"):
        for folder in _each_opened(_existing(b"/dev/shm")):
            hidden.grant(ruleset, folder, _READ | _CHANGE)
    kept = _Exceptions([*policy.all(b"hidden"), *policy.all(b"protected")])
    for folder in _each_opened(roots):
        kept.grant(ruleset, folder, _READ | _CHANGE)
    return ruleset


def tasks_of_user(user: int) -> int:
    """Threads this user has now, all processes together."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += max(1, os.stat(f"/proc/{name}/task").st_nlink - 2)
            except OSError:
                continue
    return total


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _apply_limits(policy: _Policy) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    # Data, not address space: run-times reserve far more addresses than they ever use.
    _lower(resource.RLIMIT_DATA, policy.number(b"memory"))
    _lower(resource.RLIMIT_FSIZE, policy.number(b"file-size"))
    user = os.getuid()
    if user != 0:
        # The kernel counts all processes of the user, so those that are there already are added.
        _lower(resource.RLIMIT_NPROC, policy.number(b"processes") + tasks_of_user(user))


def _drop_capabilities(libc: ctypes.CDLL, kept: int) -> None:
    import ctypes

    for capability in range(64):
        # Without CAP_SETPCAP this is refused; no_new_privs then keeps the next program from gaining any.
        if not kept >> capability & 1 and libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    current = (ctypes.c_uint32 * 6)()
    _call("capget", libc.capget(ctypes.byref(header), ctypes.byref(current)))
    low = kept & current[1]
    wanted = (ctypes.c_uint32 * 6)(low, low, 0, 0, 0, 0)
    _call("capset", libc.capset(ctypes.byref(header), ctypes.byref(wanted)))


def _install_filter(libc: ctypes.CDLL, program: bytes) -> None:
    import ctypes

    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a 16-bit length, padding, a pointer.
    count = len(program) // 8
    descriptor = (ctypes.c_uint64 * 2)(count, ctypes.addressof(instructions))
    _call("seccomp", libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(descriptor), 0, 0))


def _confine(policy: _Policy, supervisor: int) -> None:
    """Restrict this process: what it runs from here on is confined."""
    import ctypes

    libc = _libc()
    os.setsid()
    for number in (_SIGPIPE, _SIGXFSZ):
        libc.signal(number, ctypes.c_void_p(None))  # this interpreter ignores them; the command must not
    nothing = (ctypes.c_uint64 * 16)()
    libc.pthread_sigmask(_SIG_SETMASK, ctypes.byref(nothing), None)
    _apply_limits(policy)
    ruleset = _build_ruleset(policy)
    _drop_capabilities(libc, 1 << _DAC_OVERRIDE | 1 << _FOWNER if policy.flag(b"keep-dac") else 0)
    _call("no_new_privs", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _call("pdeathsig", libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))
    if os.getppid() != supervisor:
        raise SetupError("the supervisor is gone")
    ruleset.enforce()
    _install_filter(libc, bytes.fromhex(policy.one(b"filter").decode("ascii")))


def _join(groups: list[bytes]) -> None:
    """Join the command's control group, if it has one; the supervisor stays outside."""
    for members in groups:
        descriptor = os.open(members, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"0")
        finally:
            os.close(descriptor)


def _complain(message: str) -> None:
    os.write(2, f"nightshift sandbox: {message}\n".encode("utf-8", "surrogateescape"))


def _start(policy: _Policy, status: int, argv: list[bytes], supervisor: int) -> NoReturn:
    """In the forked child: confine, then become the command."""
    try:
        _join(policy.all(b"group"))
        _confine(policy, supervisor)
        os.chdir(policy.one(b"cwd"))
        os.write(status, b"s")
    except (SetupError, OSError, ValueError) as error:
        _complain(str(error))
        os._exit(SETUP_FAILED)
    os.closerange(3, 1 << 20)
    try:
        os.execvpe(argv[0], argv, os.environb)  # noqa: S606  # starting the confined command is this program's job
    except OSError as error:
        _complain(f"{os.fsdecode(argv[0])}: {error.strerror}")
        os._exit(127 if error.errno == errno.ENOENT else 126)


def children_of(pid: int) -> list[int]:
    """Children of a process, zombies too; empty when it is gone."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _content(f"/proc/{pid}/task/{task}/children").split())
    except OSError:
        return found if os.path.exists("/proc/thread-self/children") else _children_by_scan(pid)
    return found


def _content(path: str) -> bytes:
    """All of a file of /proc; a plain descriptor, since this is asked for after every command."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.read(descriptor, 65536)
        while more := os.read(descriptor, 65536):
            found += more
        return found
    finally:
        os.close(descriptor)


def _children_by_scan(parent: int) -> list[int]:
    """The same for a kernel that keeps no lists of children."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if (parent_and_session(pid) or (0, 0))[0] == parent]


def parent_and_session(pid: int) -> tuple[int, int] | None:
    """Parent and session of a process, None when it is gone."""
    try:
        fields = _content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[3])


def below(pids: Iterable[int]) -> list[int]:
    """All descendants of processes, parents before children.

    Each was a child of its parent a moment ago, so its id has not gone to somebody else since.
    """
    found: list[int] = []
    parents = list(pids)
    for parent in parents:
        mine = [pid for pid in children_of(parent) if (parent_and_session(pid) or (0, 0))[0] == parent]
        found += mine
        parents += mine
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    """Signal each; those that are gone are no fault."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def _reap(main: int) -> tuple[bool, int | None]:
    """Reap what has ended: whether any child is left, and the main child's status if it was among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, status
        if pid == 0:
            return True, status
        if pid == main:
            status = ended


def _kill_all(main: int) -> int | None:
    """Kill every descendant; the main child's status if it was among them.

    Only own children are signalled: nobody else can reap them, so their ids stay theirs. What a killed
    one leaves becomes an own child in turn.
    """
    me = os.getpid()
    deadline = time.monotonic() + _CLEANUP_SECONDS
    result = None
    while True:
        signal_all(children_of(me), _SIGKILL)
        left, status = _reap(main)
        result = status if status is not None else result
        if not left or time.monotonic() > deadline:
            return result
        time.sleep(0.0005)


def _supervise(main: int, ends: list[int]) -> int:
    """Wait for the command's end, or until one of ``ends`` is readable; clean up; returns the exit code."""
    poll = select.poll()
    for descriptor in (*ends, os.pidfd_open(main)):
        poll.register(descriptor, select.POLLIN)
    while True:
        events = poll.poll(1000)
        _, status = _reap(main)
        if status is not None or any(descriptor in ends for descriptor, _ in events):
            killed = _kill_all(main)
            code = os.waitstatus_to_exitcode(killed if status is None and killed is not None else status or 0)
            return code if code >= 0 else 128 - code


def _signal_descriptor(libc: ctypes.CDLL) -> int:
    """Block TERM and return a descriptor that tells of it: whoever sends it wants all to end at once."""
    import ctypes

    mask = (ctypes.c_uint64 * 16)(1 << _SIGTERM - 1)
    libc.pthread_sigmask(_SIG_BLOCK, ctypes.byref(mask), None)
    return _call("signalfd", libc.signalfd(-1, ctypes.byref(mask), os.O_CLOEXEC))


def _become_supervisor(policy: _Policy) -> list[int]:
    """Close this process to others and adopt orphans; returns descriptors that tell when it must end."""
    libc = _libc()
    _call("dumpable", libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    _call("subreaper", libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    runner = os.pidfd_open(os.getppid())
    if os.getppid() != policy.number(b"runner"):
        raise SetupError("the runner is gone")
    if policy.flag(b"no-lc-ctype"):
        os.environb.pop(b"LC_CTYPE", None)  # set by this interpreter's start, not by the policy
    return [runner, _signal_descriptor(libc)]


def _supervise_command(policy_descriptor: int, status: int, argv: list[bytes]) -> int:
    """Run one confined command; returns its exit code."""
    try:
        with open(policy_descriptor, "rb") as file:
            policy = _Policy(file.read())
        ends = _become_supervisor(policy)
        supervisor = os.getpid()
        child = os.fork()
    except (SetupError, OSError, ValueError) as error:
        _complain(str(error))
        return SETUP_FAILED
    if child == 0:
        _start(policy, status, argv, supervisor)
    os.close(status)
    return _supervise(child, ends)


def _serve(server: int) -> int:
    """Fork a supervisor for each request until the runner is gone; returns the exit code.

    A request is one message with the descriptors of its own fields, of POLICY and STATUS, and of the command's
    stdin, stdout and stderr. The answer is the new supervisor's process id, or what failed.
    """
    import array
    import socket

    _call("dumpable", _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    space = socket.CMSG_SPACE(_REQUEST_DESCRIPTORS * array.array("i").itemsize)
    with socket.socket(fileno=server) as connection:
        while True:
            word, parts, _, _ = connection.recvmsg(1, space)
            if not word:
                return 0
            descriptors = array.array("i")
            for _, _, data in parts:
                descriptors.frombytes(data)
            try:
                answer = b"%d" % _fork_supervisor(list(descriptors), connection)
            except OSError as error:
                answer = os.fsencode(f"cannot fork: {error.strerror}")
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(answer)


def _fork_supervisor(descriptors: list[int], connection: socket.socket) -> int:
    """Start a supervisor as a child of the runner; returns its process id.

    Its parent ends at once, and the runner adopts what its descendants orphan. It is known by its session and its
    mark, as all that the runner starts, before the runner hears of it.
    """
    told, tell = os.pipe()
    adopted, adopt = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                connection.close()
                os.close(told)
                os.close(adopt)
                _become_forked(descriptors, tell, adopted)
        except OSError as error:
            os._exit(error.errno or 1)
        finally:  # whatever happened, this is no second server
            os._exit(0)
    os.close(tell)
    os.close(adopted)
    try:
        _, status = os.waitpid(between, 0)
        failed = os.waitstatus_to_exitcode(status)
        answer = os.read(told, 32)
        if failed or not answer:
            raise OSError(failed, os.strerror(failed) if failed > 0 else "the new process ended")
        return int(answer)
    finally:
        os.close(told)
        os.close(adopt)


def _become_forked(descriptors: list[int], tell: int, adopted: int) -> NoReturn:
    """In the forked process: become the supervisor that the command line would have started."""
    request, policy, status, *streams = descriptors
    os.setsid()
    with open(request, "rb") as file:
        fields = _Policy(file.read())
    mark = fields.number(b"mark")
    if mark:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, resource.getrlimit(resource.RLIMIT_RTTIME)[1]))
    os.write(tell, b"%d" % os.getpid())
    os.close(tell)
    os.read(adopted, 1)
    os.close(adopted)
    for descriptor, number in zip(streams, range(3), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for variable in fields.all(b"variable"):
        name, _, value = variable.partition(b"=")
        os.environb[name] = value
    os._exit(_supervise_command(policy, status, fields.all(b"argument")))


def main(arguments: list[str]) -> int:
    """Run one confined command, or serve; returns the exit code."""
    if arguments[0] == "serve":
        return _serve(int(arguments[1]))
    return _supervise_command(int(arguments[0]), int(arguments[1]), [os.fsencode(each) for each in arguments[3:]])


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
