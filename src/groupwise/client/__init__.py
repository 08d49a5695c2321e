"""The client of a Groupwise server: `Client` blocks, `AsyncClient` awaits. `calls` is where to begin."""

from groupwise.client.calls import AsyncClient as AsyncClient
from groupwise.client.calls import Client as Client
