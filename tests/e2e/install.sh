#!/bin/sh
# Installs what the end-to-end tests talk to: Debian packages by name, where a program is missing and this runs as root,
# and Novu's SDKs into .e2e/. Does nothing where all is there. With DIGESTD_E2E_SKIP_MISSING=1 it goes on without what
# cannot be had; the tests of that are skipped then.
set -eu
cd "$(dirname "$0")/../.."
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
skip="${DIGESTD_E2E_SKIP_MISSING:-0}"

missing=""
for pair in node:nodejs npm:npm exim4:exim4-daemon-light prometheus-alertmanager:prometheus-alertmanager \
  systemd-nspawn:systemd-container openssl:openssl; do
  command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
done

# Tests start these programs themselves: no service may start now, nor with the next boot.
install_packages() {
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  apt-get update -qq
  # --no-remove: a mail server that is here already stays.
  # shellcheck disable=SC2086  # one word for each package
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-remove --no-install-recommends $missing >/dev/null
  for service in exim4 prometheus-alertmanager; do
    case "$missing" in
    *"$service"*) systemctl disable --quiet "$service" 2>/dev/null || true ;;
    esac
  done
}

if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$missing"
    install_packages
  else
    echo "missing:$missing; as root, with apt: apt-get install$missing" >&2
    echo "DIGESTD_E2E_SKIP_MISSING=1 skips the tests that need them" >&2
    [ "$skip" = 1 ] || exit 1
  fi
fi

# npm writes its own list last, so an installation that was cut off does not count.
node=.e2e/node clients=tests/e2e/clients
if ! command -v npm >/dev/null; then
  echo "no npm: no SDKs for JavaScript" >&2
elif ! cmp -s "$clients/package-lock.json" "$node/package-lock.json" ||
  [ ! -e "$node/node_modules/.package-lock.json" ]; then
  mkdir -p "$node"
  cp "$clients/package.json" "$clients/package-lock.json" "$node"
  (cd "$node" && npm ci --silent --ignore-scripts --no-audit --no-fund)
fi

# They need other versions than digestd itself, some of them old ones.
python=.e2e/python
if ! cmp -s "$clients/requirements.txt" "$python/requirements.txt"; then
  rm -rf "$python"
  .venv/bin/python -m venv --without-pip "$python"
  .venv/bin/python -m pip --python "$python/bin/python" install --quiet --disable-pip-version-check \
    -c constraints.txt -r "$clients/requirements.txt"
  cp "$clients/requirements.txt" "$python"
fi
