# Sourced by the scripts beside it: interpreters, virtual environments of the tree, and headings.
#   CI_VENV  where the virtual environments go (default: a temporary folder)
root=${CI_VENV:-$(mktemp -d)}

# The first of the given commands that is a Python of that version.
find_python() {
  local version=$1 candidate
  for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# A fresh environment of one interpreter with the given extras, and first, by version, the given packages.
install() {
  local python=$1 extras=$2
  shift 2
  "$python" -m venv "$root/$extras"
  if [[ $# -gt 0 ]]; then "$root/$extras/bin/python" -m pip install --quiet "$@"; fi
  "$root/$extras/bin/python" -m pip install --quiet --editable ".[$extras]"
}

step() { printf '\n=== %s (%ss)\n' "$1" "$SECONDS"; }

version_of_jax() { "$1" -c 'import jax; print(jax.__version__)'; }
