{{- define "kvd.labels" -}}
app.kubernetes.io/name: kvd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvd.name" -}}
{{ if contains "kvd" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-kvd{{ end }}
{{- end }}

{{- /* Values that contradict one another, or a daemon that would not start. */}}
{{- define "kvd.check" -}}
{{- $config := .Values.config }}
{{- $own := dict "device" (list "pool_bytes" "device" "prefault") "limits" (list "inflight_bytes_max") "server" (list "listen_tcp" "insecure") "admin" (list "listen") }}
{{- range $section, $keys := $own }}
{{- range $key := $keys }}
{{- if hasKey (default dict (get $config $section)) $key }}
{{- fail (printf "config.%s.%s: the chart sets it, so that limits, ports and probes fit; see memory, gpu, tls, insecure" $section $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not (or .Values.access.principalsSecret (and .Values.tls.enabled .Values.tls.clientCA) .Values.insecure) }}
{{- fail "nobody is asked who comes in: set access.principalsSecret, or tls.enabled and tls.clientCA, or say insecure: true" }}
{{- end }}
{{- if and (eq .Values.access.metrics "role") (not .Values.access.principalsSecret) }}
{{- fail "access.metrics: role needs access.principalsSecret" }}
{{- end }}
{{- if and .Values.tls.admin (not .Values.tls.enabled) }}
{{- fail "tls.admin needs tls.enabled" }}
{{- end }}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.issuerRef.name: say which issuer signs" }}
{{- end }}
{{- if and .Values.podDisruptionBudget.enabled (ne .Values.kind "StatefulSet") }}
{{- fail "podDisruptionBudget is of a StatefulSet: Kubernetes knows no budget of a DaemonSet" }}
{{- end }}
{{- end }}

{{- /* The settings of the daemon, by section. */}}
{{- define "kvd.settings" -}}
server:
  listen_tcp: 0.0.0.0:7070
  insecure: {{ .Values.insecure }}
  {{- if .Values.sockets.hostPath }}
  listen_unix: /run/kvd/kvd.sock
  listen_region: /run/kvd/region.sock
  {{- end }}
  {{- if .Values.tls.enabled }}
  tls_certificate: /etc/kvd-tls/tls.crt
  tls_key: /etc/kvd-tls/tls.key
  {{- if .Values.tls.clientCA }}
  tls_client_ca: /etc/kvd-tls/ca.crt
  {{- if .Values.access.principalsSecret }}
  tls_client_required: false
  {{- end }}
  {{- end }}
  {{- end }}
admin:
  listen: 0.0.0.0:9470
  metrics: {{ .Values.access.metrics }}
  {{- if .Values.tls.admin }}
  tls_certificate: /etc/kvd-tls/tls.crt
  tls_key: /etc/kvd-tls/tls.key
  {{- end }}
{{- if .Values.access.principalsSecret }}
access:
  principals: /etc/kvd-access/principals.toml
{{- end }}
device:
  device: {{ .Values.gpu.enabled | ternary .Values.gpu.device "cpu" }}
  pool_bytes: {{ .Values.memory.poolGiB }} GiB
  prefault: {{ .Values.memory.prefault }}
limits:
  inflight_bytes_max: {{ .Values.memory.inflightGiB }} GiB
{{- if .Values.disk.enabled }}
cache.disk:
  path: /var/lib/kvd/cache
  bytes: {{ .Values.disk.sizeGiB }} GiB
{{- end }}
{{- with .Values.remote }}
{{- if .url }}
cache.remote:
  url: {{ .url | quote }}
  endpoint: {{ .endpoint | quote }}
  region: {{ .region | quote }}
  prefix: {{ .prefix | quote }}
  {{- if .macKeySecret }}
  mac_key_file: /etc/kvd-mac/mac-key
  {{- end }}
  {{- if .passwordSecret }}
  password_file: /etc/kvd-password/password
  {{- end }}
{{- end }}
{{- end }}
{{- $kept := .Values.disk.enabled | ternary (dict "quota_file" "/var/lib/kvd/quotas.json") dict }}
namespaces: {{ toJson (merge (deepCopy .Values.namespaces) $kept) }}
log:
  format: json
{{- end }}

{{- define "kvd.toml" -}}
{{- $settings := mergeOverwrite (fromYaml (include "kvd.settings" .)) (deepCopy .Values.config) }}
{{- range $section, $keys := $settings }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end }}
{{- end }}
