{{- define "triptych.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters: names of pods add up to 22, and a label holds 63. */}}
{{- define "triptych.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "triptych.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "triptych.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What a selector holds; it cannot be changed later, so it is little. */}}
{{- define "triptych.selector" -}}
app.kubernetes.io/name: {{ include "triptych.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "triptych.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: triptych
{{ include "triptych.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of pods: nothing that changes with the chart's version, which would restart them all. */}}
{{- define "triptych.podLabels" -}}
app.kubernetes.io/part-of: triptych
{{ include "triptych.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* `metadata` of a resource: root, component, name; labels and annotations beside the common ones. */}}
{{- define "triptych.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "triptych.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "triptych.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "triptych.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* root, image */}}
{{- define "triptych.image" -}}
{{- $tag := coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion }}
{{- $repository := trimPrefix "/" (printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) .image.repository) }}
{{- if .image.digest }}
{{- printf "%s@%s" $repository .image.digest }}
{{- else }}
{{- printf "%s:%s" $repository $tag }}
{{- end }}
{{- end }}

{{/* Engines that there may be. */}}
{{- define "triptych.mostEngines" -}}
{{- ternary .Values.engine.autoscaling.maxReplicas .Values.engine.replicas .Values.engine.autoscaling.enabled }}
{{- end }}

{{/* HOST of an engine's scheduler, by index: a pod's stable name. */}}
{{- define "triptych.engineHost" -}}
{{- $name := printf "%s-engine" (include "triptych.fullname" .root) }}
{{- printf "%s-%d.%s.%s.svc" $name (int .index) $name .root.Release.Namespace }}
{{- end }}
