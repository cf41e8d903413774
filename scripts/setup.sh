# Sourced by the other scripts: makes .venv beside them and installs what they ask for, once.
#
#   set_up EXTRAS     leaves $VENV_PYTHON; EXTRAS as in pip's brackets, such as torch,triton,client
#
# A stamp that holds the hash of pyproject.toml says that an installation is complete. $PYTHON names
# another interpreter than the first fit one on PATH; $VENV another place than .venv.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$REPOSITORY/.venv}"
VENV_PYTHON="$VENV/bin/python"
INTERPRETER_CHECK="$REPOSITORY/tools/smartspec_launch/interpreter.py"

say() { printf '%s\n' "$*" >&2; }

# Prints the interpreter to use; where none is fit, says the one command that helps.
find_python() {
    local candidate reason="" first_reason=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        # A name on PATH may be a version manager's shim that leads nowhere: run it.
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

# The command that installs a Python that this distribution has.
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

# Runs a command with its output in a log, a dot every few seconds; shows the log if it fails.
quietly() {
    local log="$VENV/setup.log" dots status=0
    "$@" >"$log" 2>&1 &
    local child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        dots=$((${dots:-0} + 1))
        [ $((dots % 5)) -ne 0 ] || printf '.' >&2
    done
    wait "$child" || status=$?
    say " ${dots:-0} s"
    [ "$status" -eq 0 ] || { tail -n 20 "$log" >&2; say "The whole output: $log"; }
    return "$status"
}

# Where --help is among the arguments, prints the comment at the top of the script that sources this
# and ends it.
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

stamp_of() {
    local extras="$1" hash
    hash="$(sha256sum "$REPOSITORY/pyproject.toml" | cut -c1-16)"
    printf '%s\n' "$VENV/.installed-$hash-${extras//,/-}"
}

set_up() {
    local extras="$1" stamp python torch
    stamp="$(stamp_of "$extras")"
    [ ! -e "$stamp" ] || return 0
    if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || return 1
        say "Making ${VENV#"$REPOSITORY/"} with $("$python" --version)"
        "$python" -m venv --clear "$VENV" || return 1
    fi
    local pip=("$VENV_PYTHON" -m pip --disable-pip-version-check --no-input)
    # torch comes first and alone: left to the resolver, it is pulled again with packages for CUDA.
    torch="$(sed -n 's/^torch = \["\(.*\)"\].*/\1/p' "$REPOSITORY/pyproject.toml")"
    printf 'Installing %s (once) ' "$torch" >&2
    quietly "${pip[@]}" install "$torch" || return 1
    printf 'Installing the package with %s (once) ' "$extras" >&2
    quietly "${pip[@]}" install -e "$REPOSITORY[$extras]" || return 1
    touch "$stamp"
}
