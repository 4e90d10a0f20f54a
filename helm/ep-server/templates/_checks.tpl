{{/* What values.schema.json cannot say: one value against another. */}}
{{- define "ep-server.checks" -}}
{{- $name := include "ep-server.fullname" . -}}
{{- if not (regexMatch "^[a-z]" $name) }}
{{- fail (printf "name of the release = %q: a Service's name must begin with a letter, and here it would be %q (set fullnameOverride)" .Release.Name $name) }}
{{- end }}
{{- if .Values.gpu.enabled }}
{{- $count := .Values.gpu.count }}
{{- if not (or (kindIs "invalid" $count) (eq (int64 $count) (int64 .Values.ranks))) }}
{{- fail (printf "gpu.count = %d: must be null or equal to ranks = %d, as each rank has a GPU of its own" (int64 $count) (int64 .Values.ranks)) }}
{{- end }}
{{- $device := dig "parallel" "device" "cuda" .Values.config }}
{{- if ne $device "cuda" }}
{{- fail (printf "config.parallel.device = %q: must be cuda or absent with gpu.enabled" $device) }}
{{- end }}
{{- else if eq (dig "parallel" "device" "" .Values.config) "cuda" }}
{{- fail "gpu.enabled = false: must be true with config.parallel.device = \"cuda\"" }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if lt (int64 .maxReplicas) (int64 .minReplicas) }}
{{- fail (printf "autoscaling.maxReplicas = %d: must be at least autoscaling.minReplicas, %d" (int64 .maxReplicas) (int64 .minReplicas)) }}
{{- end }}
{{- end }}
{{- with .Values.multiNode }}
{{- if gt (int64 .nodes) 1 }}
{{- if has (int64 .port) (list (int64 $.Values.grpc.port) (int64 $.Values.metrics.port)) }}
{{- fail (printf "multiNode.port = %d: must differ from grpc.port and metrics.port" (int64 .port)) }}
{{- end }}
{{- if gt (mulf .nodes $.Values.ranks) 64.0 }}
{{- fail (printf "multiNode.nodes = %d: must be at most %d with ranks = %d, for 64 ranks in all" (int64 .nodes) (div 64 (int64 $.Values.ranks)) (int64 $.Values.ranks)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne .Values.handoff.role "none" }}
{{- $last := add (int64 .Values.handoff.port) (include "ep-server.ranks" . | int64) -1 }}
{{- range list .Values.grpc.port .Values.metrics.port .Values.multiNode.port }}
{{- if and (ge (int64 .) (int64 $.Values.handoff.port)) (le (int64 .) $last) }}
{{- fail (printf "handoff.port = %d: the ports up to %d, one per rank, must differ from grpc.port, metrics.port and multiNode.port" (int64 $.Values.handoff.port) $last) }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq (int64 .Values.metrics.port) (int64 .Values.grpc.port) }}
{{- fail (printf "metrics.port = %d: must differ from grpc.port" (int64 .Values.metrics.port)) }}
{{- end }}
{{- end }}
