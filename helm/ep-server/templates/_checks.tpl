{{/* What values.schema.json cannot say: one value against another. */}}
{{- define "ep-server.checks" -}}
{{- $name := include "ep-server.fullname" . -}}
{{- if not (regexMatch "^[a-z]" $name) }}
{{- fail (printf "name of the release = %q: a Service's name must begin with a letter, and here it would be %q (set fullnameOverride)" .Release.Name $name) }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if lt (int64 .maxReplicas) (int64 .minReplicas) }}
{{- fail (printf "autoscaling.maxReplicas = %d: must be at least autoscaling.minReplicas, %d" (int64 .maxReplicas) (int64 .minReplicas)) }}
{{- end }}
{{- end }}
{{- if eq (int64 .Values.metrics.port) (int64 .Values.grpc.port) }}
{{- fail (printf "metrics.port = %d: must differ from grpc.port" (int64 .Values.metrics.port)) }}
{{- end }}
{{- end }}
