"""The cases that a sandbox is tried by, each with the tests that try it and those that show what works all the same.

An index, so that a case without a test is seen. A test of what is refused runs under each backend; what differs between
root and an ordinary user is found by running these files as both, see ``test_sandbox_as_user.py``.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[1]


class Case(NamedTuple):
    """One case.

    Attributes:
        what: What a command tries.
        refused: Tests that it comes to nothing: ``files::name`` is in ``contracts/test_sandbox_files.py``.
        works: Tests that the like works where it may: the positive twins.
    """

    what: str
    refused: tuple[str, ...]
    works: tuple[str, ...]


CASES: dict[int, Case] = {
    1: Case(
        "write, create, make a folder, delete outside",
        ("files::test_nothing_changes_outside_the_workspace",),
        ("files::test_the_same_writes_work_inside_the_workspace",),
    ),
    2: Case(
        "write through a link to a file or a folder outside",
        (
            "files::test_links_do_not_lead_out",
            "worker_cases::test_nothing_outside_is_changed_through_links_ancestors_or_proc",
        ),
        ("files::test_links_inside_the_workspace_are_followed",),
    ),
    3: Case(
        "write through a hard link to a file outside",
        (
            "files::test_links_do_not_lead_out",
            "worker_cases::test_a_hard_link_that_a_command_tries_to_make_leads_nowhere",
        ),
        ("files::test_links_inside_the_workspace_are_followed",),
    ),
    4: Case(
        "truncate outside, by name or on opening",
        ("files::test_nothing_changes_outside_the_workspace",),
        ("files::test_the_same_writes_work_inside_the_workspace",),
    ),
    5: Case(
        "rename out, in, and exchange",
        ("files::test_nothing_changes_outside_the_workspace", "files::test_two_outside_files_cannot_be_exchanged"),
        (
            "files::test_the_same_writes_work_inside_the_workspace",
            "files::test_two_outside_files_cannot_be_exchanged",
        ),
    ),
    6: Case(
        "mode, times, extended attributes, owner outside",
        (
            "files::test_metadata_outside_is_kept_or_listed_as_not_enforced",
            "files::test_metadata_of_devices_is_kept_or_listed_as_not_enforced",
        ),
        ("files::test_metadata_inside_can_be_changed",),
    ),
    7: Case(
        "inode flags outside",
        ("files::test_inode_flags_outside_cannot_be_set",),
        ("files::test_inode_flags_can_be_set_without_a_sandbox",),
    ),
    8: Case(
        "leave something in the shared temporary folders",
        (
            "files::test_private_folders_replace_the_shared_ones",
            "mounts::test_the_shared_temporary_folder_does_not_last",
        ),
        ("files::test_the_temporary_folder_stays_for_the_session_under_one_path",),
    ),
    9: Case(
        "ordinary work: temporary files, pools, event loops, git",
        ("git::test_no_command_changes_the_repository",),
        (
            "tools::test_shell_tools_work",
            "tools::test_python_pools_and_event_loops_work",
            "tools::test_a_test_suite_runs",
            "git::test_no_command_changes_the_repository",
        ),
    ),
    10: Case(
        "hooks and configuration of the repository",
        ("git::test_no_command_changes_the_repository",),
        ("git::test_with_unprotected_git_the_repository_can_be_changed",),
    ),
    11: Case(
        "a .git that is a file, a link, dangling, or made during the run",
        (
            "git::test_a_worktree_and_the_repository_behind_it_are_protected",
            "git::test_a_linked_git_folder_is_protected",
            "git::test_a_dangling_link_stays",
            "git::test_a_repository_made_by_a_command_is_protected_from_the_next_command_on",
        ),
        ("git::test_a_linked_git_folder_is_protected",),
    ),
    12: Case(
        "a new file at the top of the workspace",
        ("files::test_new_top_level_files_work_where_the_backend_can",),
        ("files::test_new_top_level_files_work_where_the_backend_can",),
    ),
    13: Case(
        "read or write the log, the artifacts, a file with a secret",
        (
            "files::test_hidden_files_and_folders_cannot_be_read_or_written",
            "files::test_a_hidden_file_in_the_workspace_cannot_be_moved_into_sight",
            "worker_cases::test_hidden_files_are_out_of_reach_of_every_operation",
        ),
        ("files::test_hidden_files_and_folders_cannot_be_read_or_written",),
    ),
    14: Case(
        "the roots, folders and descriptors of other processes in /proc",
        (
            "processes::test_the_runner_cannot_be_read",
            "processes::test_what_the_runners_descriptors_lead_to_is_closed",
            "worker_cases::test_other_processes_cannot_be_read",
        ),
        ("processes::test_without_a_sandbox_the_same_process_is_open",),
    ),
    15: Case(
        "the runner's environment and memory",
        ("processes::test_the_runner_cannot_be_read", "worker_cases::test_other_processes_cannot_be_read"),
        ("processes::test_without_a_sandbox_the_same_process_is_open",),
    ),
    16: Case(
        "trace, read and write foreign memory, take a descriptor",
        ("processes::test_no_tracing_and_no_foreign_memory",),
        ("processes::test_without_a_sandbox_the_same_process_is_open",),
    ),
    17: Case(
        "kill the runner or the supervisor",
        (
            "processes::test_the_runner_cannot_be_signalled",
            "forkserver::test_a_command_can_neither_reach_nor_signal_the_server",
        ),
        (
            "processes::test_the_runner_cannot_be_signalled",
            "processes::test_without_a_sandbox_the_same_process_is_open",
        ),
    ),
    18: Case(
        "connect to sockets with a path, as the container engine's",
        ("network::test_no_unix_socket_of_the_host_can_be_reached",),
        ("network::test_with_unix_sockets_on_a_path_can_be_reached",),
    ),
    19: Case(
        "connect to abstract sockets, with the network on and off",
        ("network::test_no_unix_socket_of_the_host_can_be_reached",),
        ("network::test_no_unix_socket_of_the_host_can_be_reached",),
    ),
    20: Case(
        "with the network off: any family and type, listening, names",
        (
            "network::test_with_the_network_off_the_host_cannot_be_reached",
            "network::test_with_the_network_off_no_family_opens_that_could_leave",
            "network::test_a_server_inside_is_not_reachable_from_the_host",
        ),
        ("network::test_with_the_network_on_it_can",),
    ),
    21: Case(
        "mount, remount, enter or make namespaces, change the root, a nested sandbox",
        (
            "system::test_nothing_is_mounted_by_any_means",
            "system::test_namespaces_cannot_be_made_by_any_call",
            "system::test_every_call_of_the_deny_list_is_refused",
        ),
        (
            "system::test_namespaces_cannot_be_made_by_any_call",
            "system::test_the_same_calls_reach_the_kernel_without_a_sandbox",
        ),
    ),
    22: Case(
        "io_uring, bpf, perf, keyrings, userfaultfd",
        ("system::test_every_call_of_the_deny_list_is_refused", "system::test_foreign_system_call_tables_are_refused"),
        ("system::test_the_same_calls_reach_the_kernel_without_a_sandbox",),
    ),
    23: Case(
        "put words into a terminal",
        ("system::test_terminal_injection_is_refused", "system::test_a_terminal_of_the_host_is_out_of_reach"),
        ("system::test_without_a_sandbox_the_terminal_is_reached",),
    ),
    24: Case(
        "gain rights: a setuid copy, sudo, capabilities",
        ("system::test_a_command_has_no_capabilities_and_gains_none",),
        ("system::test_keep_dac_keeps_the_two_file_capabilities_of_root_only",),
    ),
    25: Case(
        "device nodes, the kernel's log, disks",
        ("system::test_devices_are_out_of_reach",),
        ("system::test_devices_are_out_of_reach",),
    ),
    26: Case(
        "outlive the call, the time limit, the turn, the runner",
        (
            "processes::test_a_daemon_that_ignores_signals_dies_with_its_call",
            "processes::test_a_daemon_dies_with_the_timeout",
            "processes::test_processes_that_fork_while_they_are_being_killed_are_all_gone",
            "processes::test_when_the_runner_is_killed_everything_dies",
            "worker_cases::test_a_worker_is_ended_in_the_middle_of_any_call",
        ),
        ("processes::test_background_processes_end_with_their_turn",),
    ),
    27: Case(
        "more processes, memory, file size than allowed",
        (
            "system::test_limits_of_memory_and_file_size_hold",
            "user::test_an_ordinary_user_is_confined_too",
            "groups::test_limits_hold_for_all_processes_of_a_command_together",
        ),
        ("system::test_limits_of_memory_and_file_size_hold", "user::test_an_ordinary_user_is_confined_too"),
    ),
    28: Case(
        "200 MB of output, one endless line, bytes that are no text",
        ("processes::test_a_flood_of_output_is_taken_without_filling_the_memory",),
        ("tools::test_shell_tools_work",),
    ),
    29: Case(
        "a key in the runner's environment",
        (
            "processes::test_the_child_environment_holds_nothing_but_the_allowlist",
            "e2e/test_canary.py::test_the_key_comes_out_nowhere",
        ),
        ("e2e/test_canary.py::test_any_other_value_comes_out_in_the_same_ways",),
    ),
    30: Case(
        "lines that are commands to the CI system",
        ("e2e/test_sandbox_runs.py::test_what_a_command_prints_is_no_command_to_the_ci_system",),
        ("e2e/test_sandbox_runs.py::test_what_a_command_prints_is_no_command_to_the_ci_system",),
    ),
    31: Case(
        "no backend at all",
        ("e2e/test_sandbox_runs.py::test_without_a_backend_no_request_is_made_and_nothing_is_written",),
        ("e2e/test_sandbox_runs.py::test_with_one_the_same_run_asks_and_writes",),
    ),
    32: Case(
        "odd names of a workspace, one that is a link, the root folder or a home",
        (
            "files::test_a_workspace_that_cannot_be_confined_is_a_configuration_error",
            "e2e/test_bad_input.py::test_a_bad_workspace_is_refused",
        ),
        ("files::test_any_name_of_a_workspace_works", "files::test_a_workspace_below_tmp_works"),
    ),
    33: Case(
        "any write in read-only mode; danger-full-access changes nothing and says so",
        ("files::test_read_only_writes_nothing_but_the_temporary_folder",),
        (
            "executor::test_danger_mode_runs_the_command_unchanged",
            "e2e/test_sandbox_runs.py::test_a_call_that_escalates_is_the_one_that_runs_bare",
        ),
    ),
    34: Case(
        "a root runner in the workspace of another user",
        ("system::test_keep_dac_keeps_the_two_file_capabilities_of_root_only",),
        ("system::test_keep_dac_keeps_the_two_file_capabilities_of_root_only",),
    ),
    35: Case(
        "the priority of the runner",
        ("processes::test_the_view_of_other_processes_is_as_listed",),
        ("processes::test_the_view_of_other_processes_is_as_listed",),
    ),
}

LAST = 35
BY_BACKEND = {"box", "shared_box", "backend"}
BEFORE_ANY_BACKEND = {"test_a_bad_workspace_is_refused"}
"""Tests of what is refused at load, where no backend plays a part."""


@functools.cache
def listed(path: Path) -> dict[str, set[str]]:
    """The tests of a file, each with the names of its arguments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: {argument.arg for argument in node.args.args}
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def arguments_of(reference: str) -> set[str]:
    """The arguments of a test that is named here; none with that name is a failure."""
    file, _, name = reference.partition("::")
    path = TESTS / (file if "/" in file else f"contracts/test_sandbox_{file}.py")
    assert path.exists(), f"{reference}: there is no such file"
    assert name in listed(path), f"{reference}: there is no such test"
    return listed(path)[name]


def test_no_number_is_missing() -> None:
    """One entry for each case, with tests of both kinds."""
    assert list(CASES) == list(range(1, LAST + 1))
    assert [number for number, case in CASES.items() if not case.refused or not case.works] == []


@pytest.mark.parametrize("number", CASES)
def test_each_case_has_its_tests_under_each_backend(number: int) -> None:
    """They are there, and what is refused is tried with the backend as a parameter."""
    case = CASES[number]
    for reference in case.works:
        arguments_of(reference)
    for reference in case.refused:
        if reference.rpartition("::")[2] not in BEFORE_ANY_BACKEND:
            assert arguments_of(reference) & BY_BACKEND, f"{reference} does not run under each backend"
        else:
            arguments_of(reference)
