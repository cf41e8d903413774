# The other scripts source this file. It creates .venv in the repository and installs the extras of a
# script once.
#
#   set_up EXTRAS     makes $VENV_PYTHON usable; EXTRAS are extras of pip, such as $SERVER
#
# A stamp file with the hash of pyproject.toml marks a complete installation. $PYTHON sets the
# interpreter (default: the first suitable one on PATH), and $VENV sets the folder instead of .venv.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$REPOSITORY/.venv}"
VENV_PYTHON="$VENV/bin/python"
INTERPRETER_CHECK="$REPOSITORY/tools/smartspec_launch/interpreter.py"
SERVER=torch,openvino,triton,client

say() { printf '%s\n' "$*" >&2; }

# Prints the interpreter to use. If none is suitable, prints the command that fixes this and fails.
find_python() {
    local candidate reason="" first_reason=""
    if [ -n "${PYTHON:-}" ] && ! "$PYTHON" -c '' 2>/dev/null; then
        say "PYTHON: got $PYTHON, which is no Python that runs; name another one, or unset PYTHON"
        return 1
    fi
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        # Run it, because a name on PATH may be a broken shim of a version manager.
        "$candidate" -c '' 2>/dev/null || continue
        if ! "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'; then
            reason="$("$candidate" --version 2>&1) cannot run Triton's stub; $(python_command)"
        elif reason="$("$candidate" "$INTERPRETER_CHECK" 2>&1)"; then
            printf '%s\n' "$candidate"
            return 0
        fi
        first_reason="${first_reason:-$reason}"
    done
    say "${first_reason:-No Python was found; $(python_command)}"
    return 1
}

# Prints the command that installs a suitable Python from this distribution.
python_command() {
    local version sudo_=""
    [ "$(id -u)" -eq 0 ] || sudo_="sudo "
    for version in 3.11 3.12; do
        if apt-cache show "python$version-venv" >/dev/null 2>&1; then
            printf 'run: %sapt-get install -y %s\n' "$sudo_" \
                "python$version python$version-venv libpython$version"
            return
        fi
    done
    printf 'install Python 3.11 or 3.12 with its venv module and shared libpython\n'
}

# Runs a command. Prints a dot every few seconds meanwhile, and then how long it took. The command
# runs in the foreground, so that Ctrl-C ends it too.
with_dots() {
    local status=0 begin=$SECONDS
    while sleep 4 && kill -0 $$ 2>/dev/null; do printf '.' >&2; done &
    "$@" || status=$?
    kill $! 2>/dev/null || true
    say " $((SECONDS - begin)) s"
    return "$status"
}

# `with_dots` with the output of the command in a log file, whose end is printed if it fails.
quietly() {
    local log="$VENV/setup.log" status=0
    with_dots with_log "$log" "$@" || status=$?
    [ "$status" -eq 0 ] || { tail -n 20 "$log" >&2; say "The command failed. Full log: $log"; }
    return "$status"
}

with_log() {
    local log="$1"
    shift
    "$@" >"$log" 2>&1
}

# If the arguments contain --help, prints the comment at the top of the calling script and exits.
help_if_asked() {
    local argument
    for argument in "$@"; do
        case "$argument" in
            -h | --help)
                sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
                exit 0
                ;;
        esac
    done
}

# The installation holds absolute paths, so a repository that was moved is installed again.
stamp_of() {
    local extras="$1" hash
    hash="$(printf '%s\n' "$REPOSITORY" | cat - "$REPOSITORY/pyproject.toml" | sha256sum | cut -c1-16)"
    printf '%s\n' "$VENV/.installed-$hash-${extras//,/-}"
}

set_up() {
    local extras="$1" stamp python torch
    stamp="$(stamp_of "$extras")"
    [ ! -e "$stamp" ] || return 0
    if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        if [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
            say "VENV: got $VENV, which has files and is no virtual environment; name another folder"
            return 1
        fi
        python="$(find_python)" || return 1
        printf 'Creating %s with %s ' "${VENV#"$REPOSITORY/"}" "$("$python" --version)" >&2
        with_dots "$python" -m venv --clear "$VENV" || return 1
    fi
    local pip=("$VENV_PYTHON" -m pip --disable-pip-version-check --no-input)
    # The pip of Python 3.11 takes three times as long to find the packages, but would do.
    "${pip[@]}" install -qq --upgrade pip || true
    # torch is installed first and alone, so that the resolver takes this version for all others.
    # TORCH_INDEX: of CPU builds of torch. Without it, pip may install the CUDA build.
    torch="$(sed -n 's/^torch = \["\(.*\)"\].*/\1/p' "$REPOSITORY/pyproject.toml")"
    printf 'Installing %s (only once) ' "$torch" >&2
    quietly "${pip[@]}" install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch" || return 1
    printf 'Installing the package with %s (only once) ' "$extras" >&2
    quietly "${pip[@]}" install -e "$REPOSITORY[$extras]" || return 1
    touch "$stamp"
}
