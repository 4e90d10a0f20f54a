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

{{- define "ep-server.labels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
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

{{- define "ep-server.image" -}}
{{- $tag := default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" .Values.gpu.enabled)) .Values.image.tag -}}
{{- $name := .Values.image.repository -}}
{{- if .Values.image.digest }}{{ $name }}@{{ .Values.image.digest }}{{ else }}{{ $name }}:{{ $tag }}{{ end -}}
{{- end }}

{{/* A value as text: whole numbers without an exponent. */}}
{{- define "ep-server.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}
