"""An OpenEnv server for tests: counts characters. python openenv_server.py PORT, in a Python with
openenv-core."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Seen(text=f"start {seed}", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "stop":
            return Seen(text="", done=True, reward=1.0)
        return Seen(text=str(len(action.message)), done=False, reward=0.5)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Counter, Say, Seen, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
