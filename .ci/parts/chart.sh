# The Helm chart: rendered by Helm, held against schemas of Kubernetes and of operators, and its settings
# read by kvd.
# guards: deploy/helm deploy/kvd.toml crates/kvd/src/config
set -euo pipefail
source .ci/lib.sh
venv=$PWD/target/chart
if ! "$venv/bin/python" -c "import helm_python, kubernetes_validate" 2>/dev/null; then
    { python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet helm-python-sdk==0.2.2 \
        kubernetes-validate==1.37.0 pyyaml; } || { lacking chart: helm-python-sdk cannot be installed; exit; }
fi
linted cargo build --workspace --quiet --bin kvd
"$venv/bin/python" deploy/helm/check.py target/debug/kvd "$venv/operators.json"
node=$PWD/target/chart-node
mkdir -p "$node"
cp deploy/helm/operators.mjs "$node/"
if has npm npm && { [ -d "$node/node_modules/@kubernetes-models/cert-manager" ] ||
    npm install --silent --no-save --prefix "$node" @kubernetes-models/prometheus-operator@6.0.0 \
        @kubernetes-models/cert-manager@6.0.0 >/dev/null; }; then
    node "$node/operators.mjs" "$venv/operators.json"
else
    lacking "chart: schemas of operators (npm) cannot be installed"
fi
