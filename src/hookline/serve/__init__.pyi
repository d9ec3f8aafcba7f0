"""The public names of ``hookline.serve``, each with the module it lives in."""

from hookline.engines.hidden_states import StatesOfLayer as StatesOfLayer
from hookline.engines.live_hooks import LiveHook as LiveHook
from hookline.engines.live_hooks import LiveHooks as LiveHooks
from hookline.engines.request_options import StatesWanted as StatesWanted
from hookline.serve.generation_request import Finished as Finished
from hookline.serve.generation_request import GenerationRequest as GenerationRequest
from hookline.serve.generation_request import Token as Token
from hookline.serve.http.app import make_app as make_app
from hookline.serve.http.request_gate import Settings as Settings
from hookline.serve.http.server import Server as Server
from hookline.serve.load_model import load as load
from hookline.serve.request_row import Ticket as Ticket
from hookline.serve.serving_engine import Engine as Engine

__all__: list[str]
