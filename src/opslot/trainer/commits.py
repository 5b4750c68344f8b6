"""The commits of models and data sets of the Hugging Face hub that a run reads."""

from __future__ import annotations

from opslot._base.errors import ConfigError
from opslot._base.hub import HubName, commit_of, hub_name
from opslot.checkpoint.training_state import read_state
from opslot.trainer.config import RunConfig
from opslot.trainer.output_folder import check_output
from opslot.trainer.paths import OF_HUB, paths_in, with_paths


def with_commits(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """`config` with the commit in every name of the hub, and the commits by the names that were given.

    A run that is resumed reads the commits of its checkpoint, unless another revision is named. Names without a commit
    are left as they are: the download gives the error.

    Raises:
        CheckpointError: the checkpoint to resume from is damaged.
    """
    named = {name.repository: name for _, path in paths_in(config, OF_HUB) if (name := hub_name(path))}
    if not named:
        return config, {}
    checkpoint = check_output(config.train, []) if config.train.checkpoint.resume_from else None
    recorded: dict[str, str] = {} if checkpoint is None else read_state(checkpoint)[0].get("commits", {})
    found = {given: _recorded(name, recorded) or commit_of(name) for given, name in named.items()}
    commits = {given: commit for given, commit in found.items() if commit is not None}

    def at_commit(path: str) -> str:
        name = hub_name(path)
        return path if name is None or name.repository not in commits else name.at(commits[name.repository])

    # The last revision that was named is that of the name without one, too.
    replaced = {name._replace(revision=None).repository for name in named.values()} | commits.keys()
    earlier = {given: commit for given, commit in recorded.items() if given not in replaced}
    return with_paths(config, OF_HUB, at_commit), earlier | commits


def _recorded(name: HubName, recorded: dict[str, str]) -> str | None:
    """The commit that the checkpoint has for a name; for one without a revision, of any revision, the last one."""
    if name.repository in recorded or name.revision is not None:
        return recorded.get(name.repository)
    return next((recorded[given] for given in reversed(recorded) if given.startswith(f"{name.repository}@")), None)


def require_commits(config: RunConfig) -> None:
    """Check that all ranks, and later the resumed run, read the same commits.

    Raises:
        ConfigError: a name of the hub without its commit.
    """
    for field, path in paths_in(config, OF_HUB):
        if (name := hub_name(path)) and not name.has_commit:
            raise ConfigError(
                f"{field}: the commit of {name.repository} was not found",
                hint="check the connection to the Hugging Face hub, and start the run again",
            )
