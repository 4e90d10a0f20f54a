{{/* The Pod template of all kinds, and what helm's test Pods share with it. */}}
{{- define "ep-server.secretVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "ep-server.tlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- if .Values.auth.tokenSecret }}
- name: auth
  secret:
    secretName: {{ .Values.auth.tokenSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "ep-server.volumes" -}}
- name: model
  {{- if eq .Values.model.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.claimName | quote }}
    readOnly: true
  {{- else if eq .Values.model.source "hostPath" }}
  hostPath:
    path: {{ .Values.model.hostPath.path | quote }}
    type: Directory
  {{- else if and (eq .Values.model.source "huggingface") .Values.model.huggingface.claimName }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.huggingface.claimName | quote }}
  {{- else if eq .Values.model.source "huggingface" }}
  emptyDir: {}
  {{- else }}
  image:
    reference: {{ .Values.model.image.reference | quote }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
  {{- end }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory.size | quote }}}
- name: scratch
  emptyDir: {sizeLimit: {{ .Values.scratch.size | quote }}}
{{- include "ep-server.secretVolumes" . }}
{{- with include "ep-server.clusterToken" . }}
- name: cluster
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ep-server.podSecurity" -}}
serviceAccountName: {{ include "ep-server.serviceAccount" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- mergeOverwrite (include "ep-server.podSecurityContext" . | fromYaml) .Values.podSecurityContext | toYaml | nindent 2 }}
{{- end }}

{{- define "ep-server.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.security.runAsUser }}
runAsGroup: {{ int64 .Values.security.runAsGroup }}
fsGroup: {{ int64 .Values.security.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ep-server.placement" -}}
{{- if .Values.topologySpread.enabled }}
topologySpreadConstraints:
  - topologyKey: {{ .Values.topologySpread.topologyKey | quote }}
    maxSkew: {{ int64 .Values.topologySpread.maxSkew }}
    whenUnsatisfiable: {{ .Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "ep-server.selector" . | nindent 8 }}
    {{- with .Values.topologySpread.matchLabelKeys }}
    matchLabelKeys:
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .Values.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- if and .Values.gpu.enabled .Values.gpu.runtimeClassName }}
runtimeClassName: {{ .Values.gpu.runtimeClassName | quote }}
{{- end }}
{{- end }}

{{- define "ep-server.pod" -}}
metadata:
  labels:
    {{- merge (include "ep-server.selector" . | fromYaml) .Values.podLabels .Values.commonLabels | toYaml | nindent 4 }}
  {{- with merge (deepCopy .Values.podAnnotations) .Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "ep-server.podSecurity" . | nindent 2 }}
  {{- if .Values.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  # preStop, drain, and 15 seconds to end the ranks.
  terminationGracePeriodSeconds: {{ addf (int64 .Values.drain.preStopSeconds) .Values.drain.seconds 15 | ceil | int64 }}
  {{- include "ep-server.placement" . | trim | nindent 2 }}
  {{- $download := eq .Values.model.source "huggingface" }}
  {{- if or $download .Values.initContainers }}
  initContainers:
    {{- if $download }}
    - {{ include "ep-server.download" . | indent 6 | trim }}
    {{- end }}
    {{- with .Values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - {{ include "ep-server.container" . | indent 6 | trim }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "ep-server.volumes" . | nindent 4 }}
{{- end }}
