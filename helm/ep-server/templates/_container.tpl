{{/* The server's container: command line, environment, probes. Flags are those of `ep-server serve`. */}}
{{- define "ep-server.args" -}}
- serve
- --model
- {{ include "ep-server.modelPath" . | quote }}
{{- with include "ep-server.modelName" . }}
- --model-name
- {{ . | quote }}
{{- end }}
- --ranks
- {{ int64 .Values.ranks | quote }}
- --host
- {{ .Values.listen | quote }}
- --port
- {{ int64 .Values.grpc.port | quote }}
- --grpc-drain-seconds
- {{ include "ep-server.text" .Values.drain.seconds | quote }}
- --metrics-enabled
- {{ .Values.metrics.enabled | quote }}
- --metrics-host
- {{ .Values.listen | quote }}
- --metrics-port
- {{ int64 .Values.metrics.port | quote }}
{{- if .Values.tls.enabled }}
- --grpc-tls-cert
- /etc/ep-server/tls/tls.crt
- --grpc-tls-key
- /etc/ep-server/tls/tls.key
{{- if .Values.tls.clientAuth }}
- --grpc-tls-client-ca
- /etc/ep-server/tls/ca.crt
{{- end }}
{{- end }}
{{- if .Values.auth.tokenSecret }}
- --grpc-token-file
- {{ printf "/etc/ep-server/auth/%s" .Values.auth.tokenKey | quote }}
{{- end }}
{{- if gt (int64 .Values.multiNode.nodes) 1 }}
{{- include "ep-server.clusterArgs" . }}
{{- end }}
{{- if ne .Values.handoff.role "none" }}
- --handoff-role
- {{ .Values.handoff.role | quote }}
- --handoff-port
- {{ int64 .Values.handoff.port | quote }}
{{- end }}
{{- with .Values.rdma.trafficClass }}
- --fabric-traffic-class
- {{ . | quote }}
{{- end }}
{{- if not (kindIs "invalid" .Values.rdma.gidIndex) }}
- --fabric-gid-index
- {{ int64 .Values.rdma.gidIndex | quote }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Where the checkpoint is in the container. Each downloaded revision has a directory of its own. */}}
{{- define "ep-server.modelPath" -}}
{{- $directory := .Values.model.directory -}}
{{- if eq .Values.model.source "huggingface" }}{{ $directory = .Values.model.huggingface.revision }}{{ end -}}
{{- printf "/models/%s" $directory | trimSuffix "/" -}}
{{- end }}

{{- define "ep-server.modelName" -}}
{{- $repository := ternary (base .Values.model.huggingface.repository) "" (eq .Values.model.source "huggingface") -}}
{{- default $repository .Values.model.name -}}
{{- end }}

{{/* Downloads the checkpoint, goes on where it was interrupted, and compares checksums. */}}
{{- define "ep-server.download" -}}
{{- $hub := .Values.model.huggingface -}}
name: download
image: {{ include "ep-server.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command:
  - sh
  - -euc
  - |
    download() {
      hf download "$REPOSITORY" --revision "$REVISION" --local-dir "$DIRECTORY" \
        --include '*.json' --include '*.jinja' --include '*.safetensors' --include '*.model' "$@" &&
      hf cache verify "$REPOSITORY" --revision "$REVISION" --local-dir "$DIRECTORY"
    }
    download || { echo 'not what the hub has: downloading anew'; download --force-download; }
env:
  - {name: REPOSITORY, value: {{ $hub.repository | quote }}}
  - {name: REVISION, value: {{ $hub.revision | quote }}}
  - {name: DIRECTORY, value: {{ include "ep-server.modelPath" . | quote }}}
  - {name: HF_HOME, value: /tmp/huggingface}
  {{- with $hub.endpoint }}
  - {name: HF_ENDPOINT, value: {{ . | quote }}}
  {{- end }}
  {{- if $hub.tokenSecret }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ $hub.tokenSecret | quote }}, key: {{ $hub.tokenKey | quote }}}}
  {{- end }}
securityContext:
  {{- include "ep-server.securityContext" . | nindent 2 }}
volumeMounts:
  - {name: model, mountPath: /models}
  - {name: scratch, mountPath: /tmp}
{{- end }}

{{/* Of a Pod among several. Its number: the set's ordinal in its name, or what LeaderWorkerSet tells it. */}}
{{- define "ep-server.clusterArgs" }}
- --nodes
- {{ int64 .Values.multiNode.nodes | quote }}
- --rendezvous
- {{ printf "%s:%d" (ternary "" (include "ep-server.leader" .) (eq .Values.kind "LeaderWorkerSet")) (int64 .Values.multiNode.port) | quote }}
- --cluster-connect-seconds
- {{ include "ep-server.text" .Values.multiNode.connectSeconds | quote }}
{{- if .Values.multiNode.tokenSecret }}
- --cluster-token-file
- {{ printf "/etc/ep-server/cluster/%s" .Values.multiNode.tokenKey | quote }}
{{- end }}
{{- if .Values.multiNode.tls }}
- --cluster-tls-cert
- /etc/ep-server/tls/tls.crt
- --cluster-tls-key
- /etc/ep-server/tls/tls.key
- --cluster-tls-ca
- /etc/ep-server/tls/ca.crt
{{- end }}
{{- end }}

{{/* `config`, and the threads of a rank: the CPUs that are reserved over the ranks, not all that the node has. */}}
{{- define "ep-server.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.inferencePool.enabled -}}
{{- $_ := set $config "metrics" (merge (dict "vllm_names" true) (default dict $config.metrics)) -}}
{{- end -}}
{{- $parallel := default dict $config.parallel -}}
{{- $cpu := dig "requests" "cpu" "" .Values.resources | toString -}}
{{- if and $cpu (not (hasKey $parallel "threads_per_rank")) -}}
{{- $cores := ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) (hasSuffix "m" $cpu) -}}
{{- $_ := set $parallel "threads_per_rank" (divf $cores .Values.ranks | floor | int64 | max 1 | min 256) -}}
{{- end -}}
{{- if .Values.gpu.enabled }}{{ $_ := set $parallel "device" "cuda" }}{{ end -}}
{{- set $config "parallel" $parallel | toYaml -}}
{{- end }}

{{/* What only the Pod itself knows. Its host name has the ordinal, unless it is the node's. */}}
{{- define "ep-server.clusterEnv" -}}
{{- if and .Values.hostNetwork (eq .Values.kind "StatefulSet") }}
- name: EP_SERVER_CLUSTER__NODE_RANK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
{{- end }}
{{- if not (or .Values.rdma.enabled (dig "fabric" "address" "" .Values.config)) }}
- name: EP_SERVER_FABRIC__ADDRESS
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- end }}

{{- define "ep-server.env" -}}
{{- if gt (int64 .Values.multiNode.nodes) 1 }}
{{- include "ep-server.clusterEnv" . }}
{{- end }}
{{- if ne .Values.handoff.role "none" }}
- name: EP_SERVER_HANDOFF__HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- range $section, $fields := include "ep-server.config" . | fromYaml }}
{{- range $field, $value := $fields }}
- name: {{ printf "EP_SERVER_%s__%s" (upper $section) (upper $field) | quote }}
  value: {{ include "ep-server.text" $value | quote }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Flags of a client of this server: how it trusts, who it is. */}}
{{- define "ep-server.clientFlags" -}}
{{- if .Values.tls.enabled }}
- --tls-ca
- /etc/ep-server/tls/ca.crt
{{- if .Values.tls.clientAuth }}
- --tls-cert
- /etc/ep-server/tls/tls.crt
- --tls-key
- /etc/ep-server/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/*
The kubelet's gRPC probe speaks TLS in few clusters. Elsewhere the metrics port answers the same question; without
that port, the client in the image asks it.
*/}}
{{- define "ep-server.probe" -}}
{{- $tls := .root.Values.tls.enabled }}
{{- $plain := and $tls (not .root.Values.probes.kubeletTls) }}
{{- if and $plain .root.Values.metrics.enabled }}
httpGet:
  path: {{ ternary "/readyz" "/livez" (ne .service "") }}
  port: {{ int64 .root.Values.metrics.port }}
{{- else if $plain }}
exec:
  command:
    - ep-server
    - health
    - --address
    - {{ printf "localhost:%d" (int64 .root.Values.grpc.port) | quote }}
    - --service
    - {{ .service | quote }}
    {{- include "ep-server.clientFlags" .root | trim | nindent 4 }}
{{- else }}
grpc:
  port: {{ int64 .root.Values.grpc.port }}
  {{- if $tls }}
  mode: TLS
  {{- end }}
  {{- with .service }}
  service: {{ . | quote }}
  {{- end }}
{{- end }}
periodSeconds: {{ int64 .times.periodSeconds }}
failureThreshold: {{ int64 .times.failureThreshold }}
timeoutSeconds: {{ int64 .times.timeoutSeconds }}
{{- end }}

{{- define "ep-server.resources" -}}
{{- $devices := dict -}}
{{- if .Values.gpu.enabled }}{{ $_ := set $devices .Values.gpu.resource (int64 .Values.ranks) }}{{ end -}}
{{- if .Values.rdma.enabled }}{{ $_ := set $devices .Values.rdma.resource (int64 .Values.rdma.count) }}{{ end -}}
requests:
  {{- toYaml .Values.resources.requests | nindent 2 }}
limits:
  {{- toYaml (merge (deepCopy .Values.resources.limits) $devices) | nindent 2 }}
{{- with .Values.resources.claims }}
claims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "ep-server.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The server's: RDMA registers, and so locks, memory. */}}
{{- define "ep-server.serverSecurity" -}}
{{- $given := include "ep-server.securityContext" . | fromYaml -}}
{{- if .Values.rdma.enabled }}{{ $_ := set $given.capabilities "add" (list "IPC_LOCK") }}{{ end -}}
{{- mergeOverwrite $given .Values.securityContext | toYaml -}}
{{- end }}

{{- define "ep-server.container" -}}
name: server
image: {{ include "ep-server.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [ep-server]
args:
  {{- include "ep-server.args" . | nindent 2 }}
{{- with include "ep-server.env" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
{{- with .Values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: grpc
    containerPort: {{ int64 .Values.grpc.port }}
  {{- if .Values.metrics.enabled }}
  - name: metrics
    containerPort: {{ int64 .Values.metrics.port }}
  {{- end }}
  {{- if gt (int64 .Values.multiNode.nodes) 1 }}
  - name: rendezvous
    containerPort: {{ int64 .Values.multiNode.port }}
  {{- end }}
startupProbe:
  {{- include "ep-server.probe" (dict "root" . "service" "" "times" .Values.probes.startup) | trim | nindent 2 }}
readinessProbe:
  {{- include "ep-server.probe" (dict "root" . "service" "ep_server.v1.Decode" "times" .Values.probes.readiness) | trim | nindent 2 }}
livenessProbe:
  {{- include "ep-server.probe" (dict "root" . "service" "" "times" .Values.probes.liveness) | trim | nindent 2 }}
{{- if .Values.drain.preStopSeconds }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ int64 .Values.drain.preStopSeconds }}
{{- end }}
resources:
  {{- include "ep-server.resources" . | nindent 2 }}
securityContext:
  {{- include "ep-server.serverSecurity" . | nindent 2 }}
volumeMounts:
  - {name: model, mountPath: /models, readOnly: true}
  - {name: shared-memory, mountPath: /dev/shm}
  - {name: scratch, mountPath: /tmp}
  {{- with include "ep-server.secretMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if include "ep-server.clusterToken" . }}
  - {name: cluster, mountPath: /etc/ep-server/cluster, readOnly: true}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Of a Deployment: as long as the startup probe allows, again as long to load, and a minute to be scheduled. */}}
{{- define "ep-server.progressDeadline" -}}
{{- with .Values.probes.startup -}}
{{- default (mul .periodSeconds .failureThreshold 2 | add 60) $.Values.progressDeadlineSeconds | int64 -}}
{{- end -}}
{{- end }}

{{- define "ep-server.secretMounts" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/ep-server/tls, readOnly: true}
{{- end }}
{{- if .Values.auth.tokenSecret }}
- {name: auth, mountPath: /etc/ep-server/auth, readOnly: true}
{{- end }}
{{- end }}
