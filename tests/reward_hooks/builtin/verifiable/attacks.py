"""Answers that attack the machine: each prints the secret, or ``done``, where it gets through.

``{folder}``, ``{shared}``, ``{gateway}``, ``{neighbour}``, ``{ipv4}`` and ``{ipv6}`` are what the gateway's user has
(:mod:`tests.reward_hooks.builtin.verifiable.gateway_user`).
"""

from __future__ import annotations

#: What reads or changes something outside. Run by the user itself, without a sandbox, each gets through.
REACHES = {
    "reads the expected values": """
import json
print(json.load(open("{folder}/expected.json")))
""",
    "finds the expected values by walking through the folders": """
import os
for where, _, names in os.walk("{folder}"):
    for name in names:
        if name == "expected.json":
            print(open(os.path.join(where, name)).read().strip('"'))
""",
    "rewrites the hook folder": """
open("{folder}/hooks/on_compute_relative_reward.py", "a").write("# rewritten\\n")
print("done")
""",
    "puts a module beside the hooks": """
open("{folder}/hooks/grading.py", "w").write("raise SystemExit")
print("done")
""",
    "opens the user's files to everybody": """
import os
os.chmod("{folder}/hooks", 0o777)
print("done")
""",
    "reads a neighbour's command line": """
words = open("/proc/{neighbour}/cmdline").read().split(chr(0))
print(words[-2])
""",
    "reads a neighbour's environment": """
for entry in open("/proc/{neighbour}/environ").read().split(chr(0)):
    if entry.startswith("SECRET="):
        print(entry[7:])
""",
    "goes through the root of another process": """
print(open("/proc/{neighbour}/root{folder}/expected.json").read().strip('"'))
""",
    "sees which processes run": """
import os
if "{neighbour}" in os.listdir("/proc"):
    print("done")
""",
    "connects to a UNIX socket": """
import socket
socket.socket(socket.AF_UNIX).connect("{folder}/socket")
print("done")
""",
    "connects to an abstract UNIX socket": """
import socket
socket.socket(socket.AF_UNIX).connect(chr(0) + "{folder}")
print("done")
""",
    "connects to this machine": """
import socket
socket.create_connection(("127.0.0.1", {ipv4}), 5)
print("done")
""",
    "connects to this machine over IPv6": """
import socket
socket.create_connection(("::1", {ipv6}), 5)
print("done")
""",
    "reads the keyring of the session": """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
search, read = {{"x86_64": (250, 250), "aarch64": (219, 219)}}[platform.machine()]
key = libc.syscall(search, 10, -3, b"user", b"gateway", 0)
text = ctypes.create_string_buffer(100)
size = libc.syscall(read, 11, key, text, 100)
print(text.raw[:max(size, 0)].decode())
""",
    "signals the gateway": """
import os
os.kill({gateway}, 0)
print("done")
""",
    "changes the limits of the gateway": """
import resource
resource.prlimit({gateway}, resource.RLIMIT_NOFILE)
print("done")
""",
    "makes a user namespace, where it is root": """
import ctypes
libc = ctypes.CDLL(None)
if libc.unshare(0x10000000) == 0:
    print("done")
""",
    "makes a user namespace by clone": """
import ctypes, platform
number = {{"x86_64": 56, "aarch64": 220}}[platform.machine()]
child = ctypes.CDLL(None).syscall(number, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    import os
    os._exit(0)
if child > 0:
    print("done")
""",
    "opens a socket to the host of a virtual machine": """
import socket
socket.socket(40, socket.SOCK_STREAM)
print("done")
""",
    "makes an io_uring, which no filter sees into": """
import ctypes
if ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120)) >= 0:
    print("done")
""",
    "takes memory that belongs to no process": """
import ctypes
libc = ctypes.CDLL(None)
if libc.shmget(0, 1 << 20, 0o1600) >= 0:
    print("done")
""",
    "fills the folder of temporary files": """
import os, tempfile
with tempfile.TemporaryDirectory() as folder:
    for number in range(80):
        with open(os.path.join(folder, str(number)), "wb") as file:
            file.write(bytes(1 << 20))
    print("done")
""",
    "writes beside the interpreter": """
import os, sys
place = os.path.dirname(os.__file__)
if os.access(place, os.W_OK) or os.access("{folder}", os.W_OK):
    print("done")
""",
    "looks through the gateway's open files": """
import os
if os.listdir("/proc/{gateway}/fd"):
    print("done")
""",
    "holds the gateway by a descriptor": """
import os
os.pidfd_open({gateway})
print("done")
""",
    "handles page faults by itself": """
import ctypes, platform
number = {{"x86_64": 323, "aarch64": 282}}[platform.machine()]
if ctypes.CDLL(None).syscall(number, 0) >= 0:
    print("done")
""",
    "opens a folder by its handle": """
import ctypes
libc = ctypes.CDLL(None)
handle = ctypes.create_string_buffer((128).to_bytes(4, "little"), 160)
mount = ctypes.c_int()
if libc.name_to_handle_at(-100, b"/", handle, ctypes.byref(mount), 0) == 0:
    if libc.open_by_handle_at(-100, handle, 0) >= 0:
        print("done")
""",
    "reads raw packets": """
import socket
socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
print("done")
""",
    "asks the kernel's audit": """
import socket
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)
print("done")
""",
    "reads the kernel's log": """
import ctypes
if ctypes.CDLL(None).klogctl(3, ctypes.create_string_buffer(64), 64) > 0:
    print("done")
""",
    "makes a message queue": """
import ctypes
libc = ctypes.CDLL(None)
queue = libc.msgget(0, 0o1600)
if queue >= 0:
    libc.msgctl(queue, 0, None)
    print("done")
""",
    "raises its own limits": """
import resource
_, most = resource.getrlimit(resource.RLIMIT_CPU)
resource.setrlimit(resource.RLIMIT_CPU, (600, 600 if most < 600 and most >= 0 else most))
print("done")
""",
    "traces the gateway": """
import ctypes
libc = ctypes.CDLL(None)
# PTRACE_SEIZE, which does not stop it
if libc.ptrace(0x4206, {gateway}, 0, 0) == 0:
    print("done")
""",
}

#: What namespaces keep from a program, and Landlock alone does not.
REACHES |= {
    "changes the times of the user's files": """
import os
os.utime("{folder}/hooks/on_compute_relative_reward.py", (0, 0))
print("done")
""",
    "changes the attributes of the user's files": """
import os
os.setxattr("{folder}/expected.json", "user.seen", b"x")
print("done")
""",
    "slows the gateway down": """
import os
os.setpriority(os.PRIO_PROCESS, {gateway}, 1)
print("done")
""",
    "binds the gateway to a processor": """
import os
os.sched_setaffinity({gateway}, os.sched_getaffinity({gateway}))
print("done")
""",
    "reads the memory of another process": """
import ctypes, struct
buffer = ctypes.create_string_buffer(1)
mine = struct.pack("PL", ctypes.addressof(buffer), 1)
if ctypes.CDLL(None).process_vm_readv({gateway}, mine, 1, struct.pack("PL", 0, 0), 1, 0) == 0:
    print("done")
""",
    "watches the user's files": """
import ctypes
libc = ctypes.CDLL(None)
if libc.inotify_add_watch(libc.inotify_init1(0), b"{folder}", 0xFFF) >= 0:
    print("done")
""",
    "attaches memory of the user": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_long
if libc.shmat({shared}, None, 0) != -1:
    print("done")
""",
    "opens a queue of the user": """
import ctypes
if ctypes.CDLL("librt.so.1").mq_open(b"/gateway-{gateway}", 2) >= 0:
    print("done")
""",
}

#: What would stay behind: a program, and where its trace would be.
LEAVES = {
    "a file in /tmp": ("open('/tmp/{mark}', 'w').write('x')", "/tmp/{mark}"),
    "a file in /dev/shm": ("open('/dev/shm/{mark}', 'w').write('x')", "/dev/shm/{mark}"),
    "a file in /var/tmp": ("open('/var/tmp/{mark}', 'w').write('x')", "/var/tmp/{mark}"),
    "a named semaphore": (
        "import _multiprocessing\n_multiprocessing.SemLock(1, 1, 1, '/{mark}', False)",
        "/dev/shm/sem.{mark}",
    ),
    "a shared memory object": (
        "import _posixshmem, os\n_posixshmem.shm_open('/{mark}', os.O_CREAT | os.O_RDWR, mode=0o600)",
        "/dev/shm/{mark}",
    ),
}

#: Programs that leave a folder which is hard to remove, or end in a way that is hard to understand.
COSTLY = {
    "leaves 3,000 nested folders": """
import os
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
""",
    "leaves ten thousand files": """
for number in range(10000):
    open(str(number), "w").close()
""",
    "leaves files until it is killed": """
number = 0
while True:
    open(str(number), "w").close()
    number += 1
""",
    "forks without end": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "leaves a daemon": """
import os, time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(300)
        os._exit(0)
except OSError:
    pass
""",
    "takes all memory": """
kept = []
while True:
    kept.append(bytearray(1 << 20))
""",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n",
    "ignores all signals": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
    "leaves folders that nobody may enter": """
import os
os.makedirs("a/b/c")
os.chmod("a/b", 0)
os.chmod(".", 0)
""",
    "leaves links to everywhere": """
import os
for number, target in enumerate(["/", "/etc", "..", ".", "/proc/self/root"]):
    os.symlink(target, str(number))
os.symlink("loop", "loop")
""",
    "says that there was no sandbox": """
import os, sys
sys.stderr.write("no sandbox: it is broken\\n")
sys.stderr.flush()
os._exit(125)
""",
    "says what bubblewrap says": """
import os, sys
sys.stderr.write("bwrap: Creating new namespace failed: Operation not permitted\\n")
sys.stderr.flush()
os._exit(1)
""",
    "kills all that it can reach": """
import os
os.kill(-1, 9)
""",
    "kills the first process": """
import os, signal
os.kill(1, signal.SIGKILL)
os.kill(os.getppid(), signal.SIGKILL)
""",
    "returns a number that no float can hold": "def f(x):\n    return 10 ** 400\n",
    "returns a list in a list in a list": """
def f(x):
    value = []
    for _ in range(900):
        value = [value]
    return value
""",
    "writes a deep value itself": """
import os
for number in range(3, 64):
    try:
        os.write(number, b"[" * 500000)
    except OSError:
        pass
os._exit(0)
""",
    "prints without end": "while True:\n    print('x' * 100000)\n",
    "closes all its files": "import os\nos.closerange(0, 256)\n",
    "returns an object that is equal to anything": """
class Any(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
def f(x):
    return Any()
""",
    "prints bytes that are no text": """
import os
os.write(1, bytes(range(256)) * 100)
os.write(2, bytes(range(256)) * 100)
""",
    "has a hundred thousand spaces after its fence": "```python" + " " * 100_000 + "x",
    "has a hundred thousand tabs after its fence": "```" + "\t" * 100_000,
    "is a hundred thousand fences": "```" * 100_000,
    "is a hundred thousand brackets": "(" * 100_000,
    "is not to be encoded": "x = '\\ud800'\nprint(x)",
}

#: Answers to "f(2) is 4" that are wrong, and try to be right in each form of test.
FORGES = {
    "prints the end mark that it finds in its file": """
import re, sys
text = open(sys.argv[0]).read() + open(__file__).read()
for mark in re.findall("[0-9a-f]{32}", text):
    print(mark)
import os
sys.stdout.flush()
os._exit(0)
""",
    "writes the end mark that it finds in a descriptor": """
import json, os, re
for number in range(3, 64):
    try:
        text = os.pread(number, 1 << 16, 0).decode(errors="replace")
    except OSError:
        continue
    mark, result = re.search("[0-9a-f]{32}", text), re.search("__result__ = ([0-9]+)", text)
    if mark and result:
        os.write(int(result[1]), json.dumps([mark[0]]).encode())
        os._exit(0)
""",
    "prints the mark at its end": """
import atexit, re, sys
def last():
    for mark in re.findall("[0-9a-f]{32}", open(sys.argv[0]).read()):
        print(mark)
atexit.register(last)
""",
    "echoes what it reads": "import sys\nprint(sys.stdin.read())\n",
    "returns an object that is equal to anything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 4
def f(x): return Any()
""",
    "returns a number that is equal to anything": """
class Any(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Any(5)
""",
    "returns a text that is equal to anything": """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Any("4")
""",
    "is pickled as something else": """
class Odd:
    def __reduce__(self): return (int, ("4",))
    def __repr__(self): return "4"
    def __index__(self): return 4
    def __int__(self): return 4
def f(x): return Odd()
""",
    "writes into every open file": """
import os
for number in range(3, 256):
    try:
        os.write(number, b"true 4 [4]")
    except OSError:
        pass
os._exit(0)
""",
    "leaves before its test": "import os\nos._exit(0)\n",
    "replaces json.dumps": "import json\njson.dumps = lambda value, **_: '5'\ndef f(x): return 5\n",
    "says yes and no": "def f(x): return [4, 5]\n",
    "stops assertions": "import sys\nsys.flags = None\n__debug__x = False\ndef f(x): return 5\n",
    "replaces the test's exception": """
import builtins
class AssertionError(BaseException): pass
builtins.AssertionError = AssertionError
import sys
sys.excepthook = lambda *_: None
def f(x): return 5
""",
    "traces the test": """
import sys
def trace(frame, event, arg):
    frame.f_trace_opcodes = True
    return trace
sys.settrace(trace)
def f(x): return 5
""",
    "is a string that never ends": "def f(x):\n    return 5\n'''",
    "returns nearly the number": "def f(x): return 4 + 1e-10\n",
    "returns the number as a truth": "def f(x): return x == 2\n",
}
