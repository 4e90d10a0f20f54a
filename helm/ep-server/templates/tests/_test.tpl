{{/* A Pod of `helm test`: the server's image as a client, under the server's restrictions. */}}
{{- define "ep-server.testLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end }}

{{- define "ep-server.testPod" -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "ep-server.fullname" .root }}-test-{{ .name }}
  labels:
    {{- include "ep-server.testLabels" .root | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-weight: {{ .order | quote }}
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  activeDeadlineSeconds: 120
  {{- include "ep-server.podSecurity" .root | nindent 2 }}
  containers:
    - name: test
      image: {{ include "ep-server.image" .root | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command:
        {{- .command | nindent 8 }}
      securityContext:
        {{- include "ep-server.securityContext" .root | nindent 8 }}
      {{- with include "ep-server.secretMounts" .root | trim }}
      volumeMounts:
        {{- . | nindent 8 }}
      {{- end }}
  {{- with include "ep-server.secretVolumes" .root | trim }}
  volumes:
    {{- . | nindent 4 }}
  {{- end }}
{{- end }}
