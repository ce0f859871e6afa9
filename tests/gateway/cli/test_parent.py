import signal
import subprocess
import sys


def test_a_server_ends_when_its_parents_end_of_the_pipe_closes() -> None:
    code = "import signal\nfrom gateway.cli.parent import stop_with_parent\nstop_with_parent()\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == -signal.SIGTERM
