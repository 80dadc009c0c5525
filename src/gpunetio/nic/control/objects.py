"""The base classes of object types: tables, numbers, users, and subscriptions to events.

Each type of object is a subclass in its own module, and one row of `ControlPath`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ...errors import InUseError, NoMemoryError
from ...formats.commands import Status
from ...formats.events import EventType
from ...formats.layout import Entry
from ..queues.channels import EventChannel
from ..state.tables import Table
from .command import Handlers
from .syndromes import CommandError, CommandSyndrome


def log_of(count: int) -> int:
    """Return the base-2 logarithm of a power of two."""
    return count.bit_length() - 1


class Objects(Handlers):
    """Objects of one type. A command that names a missing object fails with the syndrome `no_such`."""

    table: Table

    def __init__(self, table: Table, no_such: CommandSyndrome):
        self.table, self._no_such = table, no_such

    def close(self) -> None:
        self.table.close()

    @property
    def log_max(self) -> int:
        """Return the base-2 logarithm of the number of rows, as capabilities report it."""
        return log_of(self.table.mask + 1)

    def need(self, number: int) -> int:
        """Return the address of an object's row. CommandError if there is no such object."""
        if number not in self.table:
            raise CommandError(Status.BAD_RESOURCE, self._no_such, f"there is no {self.table.name} {number:#x}")
        return self.table.row_address(number)

    def new_row(self) -> np.ndarray:
        """Return a row of zeros to fill in. Posted unchanged, the row removes the object."""
        return np.zeros((), self.table.entry.dtype)


class CountedObjects(Objects):
    """Objects that a driver allocates with calls, not mailboxes. Their rows count the objects that use them.

    `owner` is the NIC's name, for messages.
    """

    def __init__(self, owner: str, table: Table, no_such: CommandSyndrome = CommandSyndrome.NONE):
        super().__init__(table, no_such)
        self._owner = owner

    def hold(self, *numbers: int) -> None:
        """Increment the number of users of each of these objects."""
        for number in numbers:
            self.table[number]["users"] += 1

    def release(self, *numbers: int) -> None:
        """Decrement the number of users of each of these objects."""
        for number in numbers:
            self.table[number]["users"] -= 1

    def free_row(self) -> int:
        """Return the number of a free row, and set its number of users to 0. NoMemoryError if all are in use."""
        slot = self.table.free_slot()
        if slot is None:
            raise NoMemoryError(
                f"{self._owner} has no free {self.table.name}: all {self.table.mask} are in use; close one first"
            )
        self.table.rows[slot]["users"] = 0
        return slot

    def unused(self, number: int) -> np.void:
        """Return an object's row. InUseError if another object uses it."""
        row = self.table[number]
        if row["users"]:
            users = int(row["users"])
            raise InUseError(f"{self.table.name} {number:#x} is still used by {users} object(s): close them first")
        return row


class MailboxObjects(Objects):
    """Objects that mailboxes create. Each keeps the names of the objects that use it."""

    def __init__(self, table: Table, no_such: CommandSyndrome):
        super().__init__(table, no_such)
        self._users: dict[int, list[str]] = {}  # number → names of the objects that use this one

    def free_number(self) -> int:
        """Return a free number. CommandError if all are in use."""
        slot = self.table.free_slot()
        if slot is None:
            raise CommandError(
                Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL,
                f"all {self.table.mask} {self.table.name}s are in use",
            )
        return slot

    def name_of(self, number: int) -> str:
        """Return the name of an object, for messages."""
        return f"{self.table.name} {number:#x}"

    def hold(self, number: int, user: str) -> None:
        """Add a user to an object, which then cannot be destroyed."""
        self._users.setdefault(number, []).append(user)

    def release(self, number: int, user: str) -> None:
        """Remove a user from an object."""
        self._users[number].remove(user)
        if not self._users[number]:
            del self._users[number]

    def need_unused(self, number: int) -> None:
        """Raise CommandError if another object uses the object."""
        if users := self._users.get(number):
            raise CommandError(
                Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
                f"{self.name_of(number)} is used by {', '.join(dict.fromkeys(users))}",
            )


@dataclass
class Uses:
    """The objects that an object uses: `counted` are CountedObjects, `named` are MailboxObjects."""

    counted: list[tuple[CountedObjects, int]] = field(default_factory=list)
    named: list[tuple[MailboxObjects, int]] = field(default_factory=list)

    def hold(self, user: str) -> None:
        """Add `user` to all of the objects, which then cannot be destroyed."""
        for counted, number in self.counted:
            counted.hold(number)
        for named, number in self.named:
            named.hold(number, user)

    def release(self, user: str) -> None:
        """Remove `user` from all of the objects."""
        for counted, number in self.counted:
            counted.release(number)
        for named, number in self.named:
            named.release(number, user)


class EventSources(Objects):
    """Queues that raise events. Their rows have a `channel` and a `cookie`."""

    def subscribe(self, number: int, channel: EventChannel, types: Iterable[EventType], cookie: int) -> None:
        """Subscribe a channel to events of a queue."""
        row = self.table[number]
        row["cookie"] = cookie  # before the channel, because the engine may read the row at any moment
        row["channel"] = channel.address

    def unsubscribe(self, channel: EventChannel) -> None:
        """Remove all subscriptions of a channel."""
        for index in self.subscribed("channel", channel):
            self.table.rows[index]["channel"] = 0

    def subscribed(self, field: str, channel: EventChannel) -> list[int]:
        """Return the indices of the rows whose `field` contains the channel."""
        return np.flatnonzero(self.table.given[field] == channel.address).tolist()


class ChosenEvents(EventSources):
    """Queues that raise only the types of events subscribed to. Their rows have a bit for each type in `events`."""

    def subscribe(self, number: int, channel: EventChannel, types: Iterable[EventType], cookie: int) -> None:
        row = self.table[number]
        known = int(row["events"]) if int(row["channel"]) == channel.address else 0
        row["events"] = known | sum(1 << int(kind) for kind in set(types))
        super().subscribe(number, channel, types, cookie)


class QueueObjects(EventSources, MailboxObjects):
    """Queues for RDMA that mailboxes create."""

    def __init__(self, name: str, entry: Entry, rows: int, no_such: CommandSyndrome):
        super().__init__(Table(name, entry, rows), no_such)
