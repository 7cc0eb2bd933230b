#!/usr/bin/env bash
# Install the built wheels into a new environment outside the checkout and run the main job there.
# Ours come from DIST alone; third-party packages are those of the active environment.
# Usage: tools/try_wheels.sh DIST FOLDER
set -euo pipefail
dist=$(realpath "$1")
folder=$(realpath "$2")
installed=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

python -m venv "$folder/env"
own=$("$folder/env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# The third-party packages, without the editable installs of ours: their .pth files and metadata.
mkdir "$folder/third-party"
for item in "$installed"/*; do
    case $(basename "$item") in
        k3_* | _k3_* | _editable_impl_k3_* | *.pth | pip | pip-*) ;;
        *) ln -s "$item" "$folder/third-party/" ;;
    esac
done
echo "$folder/third-party" > "$own/third-party.pth"

"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-index --no-deps --find-links "$dist" k3-core k3-kernels k3-train k3-serve
cd "$folder"
unset PYTHONPATH
"$folder/env/bin/python" -m pip check --disable-pip-version-check | grep '^k3-' && exit 1
"$folder/env/bin/python" -c 'import k3_core; print(k3_core.__file__)' | grep -F "$folder"
"$folder/env/bin/k3" plugins list
"$folder/env/bin/k3" demo
