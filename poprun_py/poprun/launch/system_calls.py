"""Names of the system calls in which a process may wait for long, by the machine's numbers for them.

The numbers are the kernel's (asm/unistd_64.h of x86_64, asm-generic/unistd.h for aarch64).
"""

import os
from typing import Final

_NUMBERS: Final = {
    "x86_64": (
        "read=0 write=1 open=2 close=3 poll=7 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 select=23 "
        "pause=34 nanosleep=35 sendfile=40 connect=42 accept=43 sendto=44 recvfrom=45 sendmsg=46 recvmsg=47 "
        "wait4=61 semop=65 msgrcv=70 fcntl=72 flock=73 fsync=74 fdatasync=75 rt_sigtimedwait=128 "
        "rt_sigsuspend=130 futex=202 io_getevents=208 restart_syscall=219 semtimedop=220 clock_nanosleep=230 "
        "epoll_wait=232 waitid=247 openat=257 pselect6=270 ppoll=271 splice=275 epoll_pwait=281 accept4=288 "
        "io_uring_enter=426 futex_waitv=449"
    ),
    "aarch64": (
        "io_getevents=4 epoll_pwait=22 fcntl=25 ioctl=29 flock=32 openat=56 close=57 read=63 write=64 "
        "readv=65 writev=66 pread64=67 pwrite64=68 sendfile=71 pselect6=72 ppoll=73 splice=76 fsync=82 "
        "fdatasync=83 waitid=95 futex=98 nanosleep=101 clock_nanosleep=115 restart_syscall=128 "
        "rt_sigsuspend=133 rt_sigtimedwait=137 msgrcv=188 semtimedop=192 semop=193 accept=202 connect=203 "
        "sendto=206 recvfrom=207 sendmsg=211 recvmsg=212 accept4=242 wait4=260 io_uring_enter=426 "
        "futex_waitv=449"
    ),
}


def name_system_call(number: str, machine: str = "") -> str:
    """What the call ``number`` is called on ``machine`` (this one, if none is named); its number when unknown."""
    pairs = (word.split("=") for word in _NUMBERS.get(machine or os.uname().machine, "").split())
    return next((name for name, known in pairs if known == number), f"system call {number}")
