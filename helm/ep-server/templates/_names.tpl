{{/* Names and labels. */}}
{{- define "ep-server.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default ($whole | replace "." "-") .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "ep-server.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end }}

{{/* Servers of all releases of the chart: those that hand KV over to each other. */}}
{{- define "ep-server.servers" -}}
{{- omit (include "ep-server.selector" . | fromYaml) "app.kubernetes.io/instance" | toYaml -}}
{{- end }}

{{/* Ranks of one server. */}}
{{- define "ep-server.ranks" -}}
{{- mul (int64 .Values.ranks) (int64 .Values.multiNode.nodes) -}}
{{- end }}

{{- define "ep-server.labels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The annotations of an object: `own`, then commonAnnotations. Begins with a line break, or is empty. */}}
{{- define "ep-server.annotations" -}}
{{- with merge (deepCopy (default dict .own)) .root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{/* The Service of the endpoint picker of the pool. */}}
{{- define "ep-server.picker" -}}
{{- default (printf "%s-picker" (include "ep-server.fullname" .)) .Values.inferencePool.picker.service -}}
{{- end }}

{{- define "ep-server.pickerSelector" -}}
{{- merge (dict "app.kubernetes.io/component" "endpoint-picker") (include "ep-server.selector" . | fromYaml) | toYaml -}}
{{- end }}

{{- define "ep-server.pickerMetadata" -}}
metadata:
  name: {{ include "ep-server.picker" . | quote }}
  labels:
    {{- include "ep-server.labels" . | nindent 4 }}
    app.kubernetes.io/component: endpoint-picker
  {{- include "ep-server.annotations" (dict "root" . "own" dict) }}
{{- end }}

{{- define "ep-server.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ep-server.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "ep-server.tlsSecret" -}}
{{- default (printf "%s-tls" (include "ep-server.fullname" .)) .Values.tls.secretName -}}
{{- end }}

{{/* The first Pod of the first server. */}}
{{- define "ep-server.leader" -}}
{{- $name := include "ep-server.fullname" . -}}
{{- if eq .Values.kind "LeaderWorkerSet" -}}
{{- printf "%s-group-0.%s-group.%s.svc" $name $name .Release.Namespace -}}
{{- else -}}
{{- printf "%s-0.%s-headless.%s.svc" $name $name .Release.Namespace -}}
{{- end -}}
{{- end }}

{{/* The Secret with the token of the Pods; nothing where there is none, or one Pod. */}}
{{- define "ep-server.clusterToken" -}}
{{- if gt (int64 .Values.multiNode.nodes) 1 }}{{ .Values.multiNode.tokenSecret }}{{ end -}}
{{- end }}

{{- define "ep-server.image" -}}
{{- $tag := default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" .Values.gpu.enabled)) .Values.image.tag -}}
{{- $name := .Values.image.repository -}}
{{- if .Values.image.digest }}{{ $name }}@{{ .Values.image.digest }}{{ else }}{{ $name }}:{{ $tag }}{{ end -}}
{{- end }}

{{/* A value as text: whole numbers without an exponent. */}}
{{- define "ep-server.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* A number of Pods, or a share of them in percent. */}}
{{- define "ep-server.count" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ int64 . }}{{ end -}}
{{- end }}
