"""The authors' public code whose traces ``authors_traces.py`` writes: repository, commit, file and licence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A file of somebody's public code.

    Attributes:
        repository: ``owner/name`` on GitHub; a clone's folder has the name.
        commit: The commit that was run.
        file: Path in the repository.
        blob: Git's own hash of the file.
        code: The functions or lines that are run.
        licence: Of the repository at that commit.
    """

    repository: str
    commit: str
    file: str
    blob: str
    code: str
    licence: str

    def path(self, folder: Path) -> Path:
        """Return the file below ``folder``; one of another text is refused."""
        path = folder / self.repository.partition("/")[2] / self.file
        text = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()
        if blob != self.blob:
            raise SystemExit(f"{path} is not the file of {self.repository} at {self.commit}; check that commit out")
        return path


FEDCOR_COMMIT = "d941083ce2840e877476182d898c1ffa878d599b"
PISCES_COMMIT = "4ba4db879a07af1bb8fb3bb27c15944d96d8baf8"
SOURCES = {
    "oort": Source(
        "SymbioticLab/Oort",
        "05a3aa1677a10f8e621055b1626ef82e73d09759",
        "oort/oort.py",
        "ff5fb4dc10181a033d57b2f7658179ab51c6bb72",
        "_training_selector.select_participant and update_client_util",
        "Apache-2.0",
    ),
    "fedscale": Source(
        "SymbioticLab/FedScale",
        "7ec441c2afa99510535adebe155d89fa8bb2c637",
        "thirdparty/oort/oort.py",
        "7f1346dd0022d9da61fe4d36b589e88d2513935b",
        "_training_selector.select_participant and update_client_util",
        "Apache-2.0",
    ),
    "fedcor": Source(
        "Yoruko-Tang/FedCor",
        FEDCOR_COMMIT,
        "src/GPR.py",
        "80416e06e87e333bd19836fd9d331e20b0491d3d",
        "Kernel_GPR.Select_Clients with a Poly_Kernel",
        "MIT",
    ),
    "active-fl": Source(
        "Yoruko-Tang/FedCor",
        FEDCOR_COMMIT,
        "src/federated_main.py",
        "dd032ab6e82dfcdbc4d4a45c65b2e67e6325673d",
        "lines 167 and 187-196 (the branch 'elif args.afl'); no code of Goetz et al. was found",
        "MIT",
    ),
    "power-of-choice": Source(
        "Yoruko-Tang/FedCor",
        FEDCOR_COMMIT,
        "src/federated_main.py",
        "dd032ab6e82dfcdbc4d4a45c65b2e67e6325673d",
        "lines 200-201 (the branch 'elif args.power_d'); no code of Cho et al. was found",
        "MIT",
    ),
    "divfl": Source(
        "melodi-lab/divfl",
        "4a5b80df85a72b97751ce1130ee5c7d76a2c1540",
        "flearn/trainers/fedbase.py",
        "4bcd53847b9361024f8e24f985572c72e6cb1fb6",
        "BaseFedarated.lazy_greedy, and greedy for the remark",
        "MIT",
    ),
    "pisces": Source(
        "SamuelGong/Pisces",
        PISCES_COMMIT,
        "plato/client_managers/sirius.py",
        "c279878e7a1630cc17d5943471536025e054b85d",
        "ClientManager.choose_clients and update_utilities_using_loss, on the records of base.py",
        "Apache-2.0",
    ),
    "refl": Source(
        "ahmedcs/REFL",
        "aa7e6425fe8b888bccfcc722a086df120cbd833e",
        "core/aggregator.py",
        "669bc758d224f5f2dd433b1fac3c68a26da5b66f",
        "Aggregator.update_importance with stale_factor -4 and stale_beta .35",
        "Apache-2.0",
    ),
    "pisces-records": Source(
        "SamuelGong/Pisces",
        PISCES_COMMIT,
        "plato/client_managers/base.py",
        "271f0fc280f8c540807d11b9ca4dbd14b572255f",
        "ClientManager.record_training_start, record_training_end, record_aggregation and get_async_client_lag",
        "Apache-2.0",
    ),
}
