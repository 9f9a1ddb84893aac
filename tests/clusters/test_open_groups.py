"""The registry of open groups: who uses one, who keeps it, and what it has yet to join."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from gradring.clusters import Cluster
from gradring.clusters.cluster import ALONE_RENDEZVOUS
from gradring.config.values import DEFAULTS
from gradring.group.open_groups import Membership, OpenGroups


@dataclass(eq=False)
class Group:
    generation: int = 0


def test_the_last_user_closes_a_group_and_one_that_is_closed_has_no_user() -> None:
    groups: OpenGroups[Group] = OpenGroups()
    group = Group()
    groups.add(group)
    groups.use_of(group).users += 1
    assert group in groups and list(groups) == [group]
    assert not groups.let_go(group) and groups.let_go(group)
    groups.remove(group)
    groups.remove(group)
    assert group not in groups and groups.let_go(group)


def test_a_group_stays_while_somebody_has_it_or_it_is_kept() -> None:
    groups: OpenGroups[Group] = OpenGroups()
    for keeps in (True, False):
        group = Group()
        groups.add(group)
        if keeps:
            groups.keep(group)
    del group
    gc.collect()
    (kept,) = groups
    assert groups.kept() == [kept]
    groups.remove(kept)
    groups.keep(kept)
    assert groups.kept() == list(groups) == []


def test_members_are_yet_to_join_until_there_is_another_generation() -> None:
    groups: OpenGroups[Group] = OpenGroups()
    group = Group()
    groups.add(group)
    assert groups.yet_to_join(group) == ()
    cluster = Cluster(0, 1, ALONE_RENDEZVOUS, None, "arguments", "")
    groups.use_of(group).membership = Membership(cluster, DEFAULTS, ["10.0.0.5:1"])
    assert groups.yet_to_join(group) == ["10.0.0.5:1"]
    group.generation = 1
    assert groups.yet_to_join(group) == ()
