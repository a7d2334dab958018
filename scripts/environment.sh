# Sourced by the scripts beside it: makes or reuses a virtual environment and
# installs the package with the extras in $1 ("" for none), again only when
# pyproject.toml has changed.
#
#   PYTHON   interpreter for a new environment (default: python3 if it is 3.11 or
#            newer, else the newest python3.x on PATH)
#   VENV     where the environment is (default: .venv in the checkout)
#
# Leaves $venv_python, and $JAX_PLATFORMS as cpu.

recent_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if recent_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer among: ${PYTHON:-python3, python3.14 .. python3.11, python}" >&2
    echo "       install one, or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

make_environment() {
    local extras=$1 python stamp wanted
    if ! recent_enough "$venv_python"; then
        python=$(find_python)
        echo "making $venv with $("$python" --version)" >&2
        "$python" -m venv --clear "$venv"
    fi
    stamp="$venv/.installed-${extras:-plain}"
    wanted="$PWD $(cksum < pyproject.toml)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing meshslice-jax${extras:+[$extras]} into $venv" >&2
        "$venv_python" -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
        echo "$wanted" > "$stamp"
    fi
}

venv=${VENV:-.venv}
venv_python=$venv/bin/python
export JAX_PLATFORMS=cpu
make_environment "$1"
