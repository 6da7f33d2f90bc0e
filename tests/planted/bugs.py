"""Bugs that an engineer could write, as texts to replace, each with the tests that should notice it.

A bug is found by its package and the text of the right code, which stands once in it; where that moves to another
module, nothing is to be done. When the text itself has changed, write the bug anew.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug.

    Attributes:
        name: What goes wrong.
        package: ``poprun`` or ``popdist``.
        before: The right code.
        after: What stands there in its place.
        tests: The tests below ``tests`` that should notice, as pytest names them.
    """

    name: str
    package: str
    before: str
    after: str
    tests: tuple[str, ...]


BUGS = (
    # planning
    Bug(
        "instances of a host leave its last NUMA node unused",
        "poprun",
        "set(range(k * len(nodes) // count, (k + 1) * len(nodes) // count))",
        "set(range(k * (len(nodes) // count), (k + 1) * (len(nodes) // count)))",
        ("unit/test_placement.py",),
    ),
    Bug(
        "one core fewer than a control group allows is used",
        "poprun",
        "kept += total <= max_cores",
        "kept += total < max_cores",
        ("unit/test_placement.py",),
    ),
    Bug(
        "ranges of numbers may touch",
        "poprun",
        "before[1] < after[0]",
        "before[1] <= after[0]",
        ("unit/test_ranges.py",),
    ),
    Bug(
        "a square number has one divisor twice",
        "poprun",
        "for count in reversed(small) if count * count != number)",
        "for count in reversed(small))",
        ("unit/test_request.py",),
    ),
    Bug(
        "the last machine of an allocation is left out",
        "poprun",
        "(machines[-1] + 1) * IPUS_PER_MACHINE",
        "machines[-1] * IPUS_PER_MACHINE",
        ("unit/test_pods.py",),
    ),
    Bug(
        "a pod's hosts get overlapping shares",
        "poprun",
        "return pod.ipus[number * size : (number + 1) * size]",
        "return pod.ipus[number : number + size]",
        ("unit/test_pods.py", "unit/test_host_names.py"),
    ),
    Bug(
        "replicas that take turns have a GPU each",
        "poprun",
        "first_device = local_index * self.num_ipus_per_instance, local_index * self.ipus_per_replica",
        "first_device = local_index * self.num_ipus_per_instance, local_index * self.num_ipus_per_instance",
        ("unit/test_domains.py",),
    ),
    Bug(
        "the IPUs of an instance are those of one replica",
        "poprun",
        "ipus=range(first_ipu, first_ipu + self.num_ipus_per_instance)",
        "ipus=range(first_ipu, first_ipu + self.ipus_per_replica)",
        ("unit/test_domains.py",),
    ),
    Bug(
        "a job that just fits an IPU-Link domain is refused",
        "poprun",
        "num_ipus // count <= size",
        "num_ipus // count < size",
        ("unit/test_domains.py",),
    ),
    Bug(
        "a lease on GPUs counts virtual IPUs",
        "poprun",
        "self.num_ipus = plan.num_gpus_per_host",
        "self.num_ipus = plan.num_ipus_per_host",
        ("unit/test_leases.py",),
    ),
    Bug(
        "the domains of a job on several hosts are looked for on each",
        "poprun",
        "num_domains = max(1, plan.num_ilds // len(plan.hosts))",
        "num_domains = plan.num_ilds",
        ("unit/test_leases.py",),
    ),
    # the job
    Bug(
        "a second Ctrl-C does not kill",
        "poprun",
        "if job.num_interrupts > 1:",
        "if job.num_interrupts > 2:",
        ("unit/test_policy.py",),
    ),
    Bug(
        "poprun kills while the agents' grace still runs",
        "poprun",
        "job.in_phase_seconds >= limits.grace_seconds + _ESCALATION_SECONDS",
        "job.in_phase_seconds >= limits.grace_seconds",
        ("unit/test_policy.py",),
    ),
    Bug(
        "the pause before a restart has no bound",
        "poprun",
        "return min(2.0**restart_count, _LONGEST_PAUSE_SECONDS)",
        "return max(2.0**restart_count, 1.0)",
        ("unit/test_start.py",),
    ),
    Bug(
        "a program killed by a signal gives poprun the signal's number as exit code",
        "poprun",
        "return shell_code(failed.exit_code)",
        "return abs(failed.exit_code)",
        ("unit/test_report.py", "unit/test_start.py"),
    ),
    Bug(
        "an instance that was let down is named before the one that failed",
        "poprun",
        "key=lambda status: (_LET_DOWN.get(status.problem, 0), status.exited_at_seconds or 0.0)",
        "key=lambda status: (status.exited_at_seconds or 0.0, _LET_DOWN.get(status.problem, 0))",
        ("unit/test_report.py", "unit/test_start.py"),
    ),
    Bug(
        "a hang counts from the instance that got on first",
        "poprun",
        "idle_seconds=min(_idle_seconds",
        "idle_seconds=max(_idle_seconds",
        ("unit/test_hangs.py",),
    ),
    Bug(
        "a hang that was told of is never told of again",
        "poprun",
        "        if self.idle_seconds < before:\n            self.is_told = False\n",
        "",
        ("unit/test_hangs.py",),
    ),
    Bug(
        "a restarted program believes to run for the first time",
        "poprun",
        "StartFacts(job_id=identity.job_id, restart_count=identity.restart_count,",
        "StartFacts(job_id=identity.job_id, restart_count=0,",
        ("process/test_restarts.py::test_a_failed_job_is_started_again_until_it_ends_well",),
    ),
    # output
    Bug(
        "a line ending is torn between two reads",
        "poprun",
        'data.rfind(b"\\r", 0, -1) + 1',
        'data.rfind(b"\\r") + 1',
        ("unit/test_lines.py",),
    ),
    Bug(
        "the last partial line is given twice",
        "poprun",
        'rest, self._rest = self._rest, b""\n        return rest if',
        "rest = self._rest\n        return rest if",
        ("unit/test_lines.py",),
    ),
    Bug(
        "folded lines count as held when they are shown",
        "poprun",
        "self._held_bytes -= len(line) * len(instances)",
        "self._held_bytes -= len(line)",
        ("unit/test_folding.py",),
    ),
    Bug(
        "a bar is not put back below another's lines",
        "poprun",
        "return erase + text + self._bar",
        "return erase + text",
        ("unit/test_progress_bars.py",),
    ),
    # agents and the control channel
    Bug(
        "the tail of a message that was too long is taken for a message",
        "poprun",
        'self._rest, self._is_too_long = b"", True',
        'self._rest, self._is_too_long = b"", False',
        ("unit/test_control.py",),
    ),
    Bug(
        "an unsealed message is accepted",
        "poprun",
        "if not _is_same(mark, self._mark(self._receiving_key, self._num_received, text)):",
        "if mark and not _is_same(mark, self._mark(self._receiving_key, self._num_received, text)):",
        ("unit/test_control.py",),
    ),
    Bug(
        "a message can be sent again by others",
        "poprun",
        "        self._num_received += 1\n",
        "",
        ("unit/test_control.py",),
    ),
    Bug(
        "a stopped program is not continued to end in order",
        "poprun",
        "            os.killpg(program, signal.SIGCONT)\n",
        "",
        ("unit/test_agent.py",),
    ),
    Bug(
        "each request to end moves the deadline",
        "poprun",
        "if self._deadline_seconds is None:\n            self._deadline_seconds = time.monotonic() + seconds",
        "self._deadline_seconds = time.monotonic() + seconds",
        ("unit/test_agent.py",),
    ),
    Bug(
        "a process that got a dead one's id is signalled",
        "poprun",
        "if key_of(key.pid) == key:",
        "if key_of(key.pid) is not None:",
        ("process/test_process_tree.py",),
    ),
    Bug(
        "a program that does not listen is signalled",
        "poprun",
        "or not catches(pid, signum) or",
        "or",
        ("process/test_hangs.py::test_who_does_not_listen_is_never_signalled",),
    ),
    # the pool and leases
    Bug(
        "a job overtakes those that wait before it",
        "poprun",
        "    if any(other.id < lease.id for other in state.waiting(wish.queue)):\n        return ()\n",
        "",
        ("unit/test_pool.py",),
    ),
    Bug(
        "a partition that is reset may not have its own IPUs again",
        "poprun",
        "(state.taken - set(old.ipus))",
        "(state.taken)",
        ("unit/test_pool.py",),
    ),
    Bug(
        "the lease of a job that fails to ask stays",
        "poprun",
        "            except BaseException:\n                end_lease(folder, key)\n",
        "            except BaseException:\n",
        ("unit/test_pool.py",),
    ),
    Bug(
        "the folder of the pool may be a link",
        "poprun",
        "os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_DIRECTORY | os.O_CLOEXEC",
        ("process/test_pool_attacks.py",),
    ),
    Bug(
        "a lease is whose its row says",
        "poprun",
        "holder=replace(lease.holder, user=user_name(uid))",
        "holder=lease.holder",
        ("process/test_pool_attacks.py",),
    ),
    Bug(
        "a file of the pool may have several names",
        "poprun",
        "if found.st_nlink > 1:",
        "if found.st_nlink > 9:",
        ("process/test_pool_attacks.py",),
    ),
    Bug(
        "the lock of a lease stays when asking fails",
        "poprun",
        "                end_lease(folder, key)\n                os.close(descriptor)\n",
        "                end_lease(folder, key)\n",
        ("unit/test_pool.py",),
    ),
    Bug(
        "a lease outlasts a reboot",
        "poprun",
        "if holder.boot_id != boot_id():\n        return False",
        "if holder.boot_id != boot_id():\n        return True",
        ("unit/test_pool.py",),
    ),
    Bug(
        "a renewal waits for an answer longer than the lease lasts",
        "poprun",
        "patience_seconds = min(server.timeout_seconds, self._lease_seconds / _PATIENCE)",
        "patience_seconds = server.timeout_seconds",
        ("unit/test_renewal.py",),
    ),
    Bug(
        "the server reads requests of any length",
        "poprun",
        "if len(body) > MAX_BODY_BYTES:",
        "if len(chunk) > MAX_BODY_BYTES:",
        ("unit/test_request_body.py",),
    ),
    Bug(
        "the server lets in who shows no token",
        "poprun",
        "if not hmac.compare_digest(given.encode(), token.encode()):",
        "if given and not hmac.compare_digest(given.encode(), token.encode()):",
        ("process/test_served_pool.py::test_what_is_not_allowed_is_refused_in_one_line",),
    ),
    # the order of addition and the layout
    Bug(
        "the tree adds the right half first",
        "popdist",
        "value = self._add(self._held.pop()[1], value)",
        "value = self._add(value, self._held.pop()[1])",
        ("unit/test_tree.py",),
    ),
    Bug(
        "an instance's block is cut into more partial sums than need be",
        "popdist",
        "min(start + (2 << level), n) <= stop",
        "min(start + (2 << level), n) < stop",
        ("unit/test_tree.py",),
    ),
    Bug(
        "micro batches are dealt before replicas",
        "popdist",
        "for share in shares for index in range(accumulation)]",
        "for index in range(accumulation) for share in shares]",
        ("unit/test_micro_batches.py",),
    ),
    Bug(
        "long descriptions that differ at the end agree",
        "popdist",
        'return text[: TEXT_BYTES - len(digest) - 4] + b"... " + digest',
        "return text[:TEXT_BYTES]",
        ("unit/test_headers.py",),
    ),
    # a step of training
    Bug(
        "a parameter used only in an earlier micro batch loses its gradient",
        "popdist",
        ".used |= self._gradients.used()",
        ".used = self._gradients.used()",
        ("unit/test_replicated_model.py",),
    ),
    Bug(
        "a step that is abandoned leaves its buffers",
        "popdist",
        "        self._gradients.clear()\n        self._buffers.undo()\n",
        "        self._gradients.clear()\n",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "a step that is abandoned is not told to the others",
        "popdist",
        'self._say("abandoned").wait(timeout_seconds)',
        "pass",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "the mean over micro batches forgets their weight",
        "popdist",
        "self._gradients.fill(rows, times=weight / unit, are_taken=True)",
        "self._gradients.fill(rows, are_taken=True)",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "replicas without a micro batch count in the mean of buffers",
        "popdist",
        "means = cut(row[:-1] / row[-1],",
        "means = cut(row[:-1] / layout.num_replicas,",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "a replica's buffers are kept by reference",
        "popdist",
        "{key: made.clone() for key, made in changed.items()}",
        "dict(changed)",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "a parameter without gradient keeps that of the step before",
        "popdist",
        "                if gradient is None:\n                    slot.zero_()\n                elif",
        "                if gradient is None:\n                    continue\n                elif",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "an unused parameter gets a gradient of zeros",
        "popdist",
        "                if used >> index & 1:\n",
        "                if True:\n",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "two replicas draw alike in two generators",
        "popdist",
        'f"{seed} {replica} {generator}".encode()',
        'f"{seed} {generator}".encode()',
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "loops side by side leave each other's random states behind",
        "popdist",
        "was_last = self._entered[-1] is self",
        "was_last = True",
        ("unit/test_randomness.py",),
    ),
    # between instances
    Bug(
        "an instance that gave up does not tell the others",
        "popdist",
        "            self.failure = reason\n            self._mine[STATE] = GAVE_UP\n",
        "            self.failure = reason\n",
        ("contract/test_lost_ranks.py",),
    ),
    Bug(
        "a channel with work left is closed as if it were idle",
        "popdist",
        "if self._num_done < self.num_issued or not wait_until(self._is_idle, END_SECONDS):",
        "if not wait_until(self._is_idle, END_SECONDS):",
        ("unit/test_channel.py",),
    ),
    Bug(
        "a collective overtakes one that was issued before it",
        "popdist",
        "if not is_async and not self.pending:",
        "if not is_async:",
        ("contract/test_process_group.py::test_laws[2]",),
    ),
    Bug(
        "instances add what they share in the order of hosts",
        "popdist",
        "aligned_nodes(first, first + block, layout.num_replicas) for first in hosts]",
        "aligned_nodes(first, first + block, layout.num_replicas) for first in reversed(hosts)]",
        ("contract/test_several_hosts.py",),
    ),
    Bug(
        "floats are added one after the other, and not as a tree",
        "popdist",
        "total = tree_sum([row.to(wide) for row in rows], torch.add)",
        "total = sum(row.to(wide) for row in rows)",
        ("contract/test_collectives.py::test_sums_between_hosts[4]",),
    ),
    Bug(
        "gathered rows keep their padding",
        "popdist",
        "torch.cat([row[: kind[0]] for row, kind",
        "torch.cat([row for row, kind",
        ("contract/test_data.py",),
    ),
    Bug(
        "a page of progress may be read in the middle of a change",
        "popdist",
        "if len(page) < USED_BYTES or page[: _COUNT.size] != page[_BEGUN_AT : _BEGUN_AT + _COUNT.size]:",
        "if len(page) < USED_BYTES:",
        ("unit/test_progress.py",),
    ),
    Bug(
        "the signal handlers of before do not come back",
        "popdist",
        "signal.signal(signum, signal.SIG_DFL if handler is None else handler)",
        "signal.signal(signum, signal.SIG_DFL)",
        ("unit/test_preemption.py",),
    ),
    # data and checkpoints
    Bug(
        "a full remainder gives a replica nothing",
        "popdist",
        "not full < remaining < full + self.num_replicas",
        "not full < remaining < full + self.num_replicas - 1",
        ("unit/test_epoch.py",),
    ),
    Bug(
        "a permutation leaves its range",
        "popdist",
        "outside = outside[values[outside] >= self._length]",
        "outside = outside[values[outside] > self._length]",
        ("unit/test_epoch.py",),
    ),
    Bug(
        "a resumed epoch begins at its start",
        "popdist",
        '        self.num_read = int(state["position"])\n',
        "",
        ("unit/test_sampler.py",),
    ),
    Bug(
        "one checkpoint more than asked for is kept",
        "popdist",
        "for step in steps_in(folder)[:-count]:",
        "for step in steps_in(folder)[: -count - 1]:",
        ("unit/test_checkpoint_folder.py",),
    ),
    Bug(
        "a checkpoint has its name before it is on the disk",
        "popdist",
        "        _sync_tree(partial)\n        partial.rename(directory)\n",
        "        partial.rename(directory)\n        _sync_tree(directory)\n",
        ("unit/test_checkpoint_folder.py",),
    ),
    Bug(
        "a changed manifest is believed",
        "popdist",
        'if whole["digest"] != _digest_of(content):',
        'if not whole["digest"]:',
        ("unit/test_checkpoint.py",),
    ),
    Bug(
        "a module is loaded before an optimizer that may refuse",
        "popdist",
        "sorted(things, key=lambda name: isinstance(things[name], nn.Module))",
        "sorted(things, key=lambda name: not isinstance(things[name], nn.Module))",
        ("unit/test_checkpoint.py",),
    ),
    Bug(
        "a sharded optimizer's other groups keep their learning rate",
        "popdist",
        "            within.update(settings_of(own))\n        return self._inside",
        "            within.update(settings_of(own))\n            break\n        return self._inside",
        ("contract/test_sharded_optimizer.py::test_laws_on_two_hosts",),
    ),
)
