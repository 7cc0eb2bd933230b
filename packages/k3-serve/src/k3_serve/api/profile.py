"""Profiles: what a hosted API adds to the contract (serving 4b).

"open" is this server's own; "kimi" has the fixed parameters of Kimi's hosted API, where another
value than the one that the model is made for is an error.
"""

from __future__ import annotations

from typing import Any

from k3_serve.api.errors import bad_request
from k3_serve.api.sampling import stop_strings
from k3_serve.api.schemas import SamplingFields

PROFILES = ("open", "kimi")
_FIXED: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 0.95,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "n": 1,
}
MAX_STOPS = 5
MAX_STOP_BYTES = 32


def check_profile(body: SamplingFields, profile: str) -> None:
    """Raises ApiError 400 for a parameter that the profile does not allow."""
    if profile != "kimi":
        return
    for name, value in _FIXED.items():
        given: Any = getattr(body, name)
        if given is not None and given != value:
            raise bad_request(f"{name} is {given}; this model has it fixed at {value}", name)
    stops = stop_strings(body)
    if len(stops) > MAX_STOPS:
        raise bad_request(f"{len(stops)} stop strings; at most {MAX_STOPS}", "stop")
    for index, stop in enumerate(stops):
        if (size := len(stop.encode("utf-8", "surrogatepass"))) > MAX_STOP_BYTES:
            raise bad_request(
                f"stop[{index}] has {size} bytes; at most {MAX_STOP_BYTES}", f"stop[{index}]"
            )
