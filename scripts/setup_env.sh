# Shared by quickstart, test and .ci/run: source it, then call `setup_env EXTRA`.
# Afterwards $root is the checkout and $py the Python of its .venv, with fxq installed editable.
#
# Settings from outside: PYTHON picks the interpreter, CONSTRAINTS a file of versions other than
# scripts/constraints.txt; pip's own variables work, for example
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for the small CPU build of torch on Linux.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
py=$venv/bin/python
if [[ ${OS:-} == Windows_NT ]]; then py=$venv/Scripts/python.exe; fi
constraints=${CONSTRAINTS:-$root/scripts/constraints.txt}

say() { printf '[fxq] %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Print the path of a Python that is new enough: $PYTHON, else the first one found.
find_python() {
    local name
    local -a names=(python3 python3.14 python3.13 python3.12 python3.11 python3.10 python)
    if [[ -n ${PYTHON:-} ]]; then names=("$PYTHON"); fi
    for name in "${names[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' </dev/null >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    die "fxq needs Python 3.10 or newer; tried: ${names[*]}. On Debian or Ubuntu:" \
        "sudo apt-get install python3 python3-venv; or name one: PYTHON=/path/to/python3"
}

make_venv() {
    # A venv whose base Python is gone, or whose creation was interrupted, is made anew.
    if "$py" -c 'import pip' </dev/null >/dev/null 2>&1; then return; fi
    local base version
    base=$(find_python)
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$base" -c 'import venv, ensurepip' </dev/null >/dev/null 2>&1 ||
        die "$base cannot make a virtual environment. On Debian or Ubuntu: sudo apt-get install python$version-venv"
    say "making .venv with Python $version ($base)"
    "$base" -m venv --clear "$venv" </dev/null
}

pip_install() {
    "$py" -m pip install --quiet --no-input --disable-pip-version-check \
        --constraint "$constraints" "$@" </dev/null
}

# install_packages EXTRA: torch and fxq[EXTRA], unless a stamp says that it was done for these very files.
install_packages() {
    local extra=$1 sum
    # The path is part of it: an editable install breaks when the checkout moves.
    sum=$({ echo "$root"; cat "$root/pyproject.toml" "$constraints"; } | cksum)
    if [[ $(cat "$venv/.fxq-$extra" 2>/dev/null) == "$sum" ]]; then return; fi
    # dev holds all that the others do
    if [[ $(cat "$venv/.fxq-dev" 2>/dev/null) == "$sum" ]]; then return; fi
    # First and alone, so that nothing else can bring in another torch, and its failure is its own.
    say "installing PyTorch (a large download; the top of scripts/setup_env.sh tells how to get the small CPU build)"
    pip_install torch || die "PyTorch could not be installed: no connection, or no build of the version in" \
        "scripts/constraints.txt for $("$py" --version) (choose another with PYTHON=python3.x, after rm -r .venv)"
    say "installing fxq and its \"$extra\" packages"
    pip_install --editable "$root[$extra]" || die "fxq[$extra] could not be installed; pip says why above"
    echo "$sum" >"$venv/.fxq-$extra"
}

# apt_install PACKAGE WHY: install a package where apt-get is there and may be used; otherwise nothing happens.
apt_install() {
    local -a admin=()
    command -v apt-get >/dev/null || return 0
    if [[ $(id -u) != 0 ]]; then
        sudo -n true </dev/null 2>/dev/null || return 0
        admin=(sudo -n)
    fi
    say "installing $1 ($2) with apt-get"
    # An update that fails for one of several sources need not matter.
    "${admin[@]+"${admin[@]}"}" apt-get update -qq </dev/null >&2 || true
    "${admin[@]+"${admin[@]}"}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends "$1" </dev/null >/dev/null || true
    hash -r
}

# Graphviz's `dot` draws the graphs. Everything else works without it, so its absence is no error.
ensure_dot() {
    if command -v dot >/dev/null; then return; fi
    apt_install graphviz "for dot, which draws the graphs"
    if command -v dot >/dev/null; then return; fi
    say "warning: Graphviz's \"dot\" is missing and could not be installed here: graphs are written as .dot text, not" \
        "as pictures. To install it: sudo apt-get install graphviz (Debian, Ubuntu), sudo dnf install graphviz" \
        "(Fedora), brew install graphviz (macOS)"
}

# Whether there is a Chromium that runs: Ubuntu's package of that name is a stub where there is no snap.
has_chromium() {
    local name
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if "$name" --version </dev/null >/dev/null 2>&1; then return; fi
    done
    "$py" -c 'import sys
from pathlib import Path
from playwright.sync_api import sync_playwright
with sync_playwright() as p: sys.exit(not Path(p.chromium.executable_path).exists())' </dev/null >/dev/null 2>&1
}

# Chromium runs the tests of the report page; without it they are skipped.
ensure_chromium() {
    if has_chromium; then return; fi
    apt_install chromium "which runs the tests of the report page"
    if has_chromium; then return; fi
    "$py" -m playwright install chromium </dev/null >&2 || true
    if has_chromium; then return; fi
    say "warning: there is no Chromium and none could be installed here: the tests of the report page are skipped." \
        "To install it: sudo apt-get install chromium (Debian), sudo dnf install chromium (Fedora)," \
        "or $py -m playwright install --with-deps chromium"
}

# setup_env EXTRA: all that is needed to run with the optional packages EXTRA (demo, docs or dev).
setup_env() {
    make_venv
    install_packages "$1"
    ensure_dot
}
