"""Why a device cannot be used, by reason: what the daemon counts and shows, and what tells a user what to do next."""

from enum import StrEnum


class DeviceReason(StrEnum):
    """One name per kind of trouble; the text beside it is for people."""

    BAD_NAME = "bad_device_name"
    NO_SUCH_DEVICE = "no_such_device"
    NO_DRIVER = "no_driver"
    OUT_OF_MEMORY = "out_of_memory"
    NOT_SUPPORTED = "not_supported"
    BAD_EXPORT = "bad_export"
    WRONG_DEVICE = "wrong_device"
    LOST = "device_lost"
    DRIVER = "driver_error"
    BUSY = "queue_full"
    CLOSED = "closed"


class DeviceError(Exception):
    """A device, or memory on it, cannot be used. `reason` is for counting, the text says what to do."""

    def __init__(self, reason: DeviceReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
