{{/*
The pod of an engine: root, and what of it: `whole` (scheduler and executor), `scheduler`, `rank`.

The executor ends after its scheduler, so that streams end well: a sidecar ends after the main container.
*/}}
{{- define "triptych.enginePod" -}}
{{- $root := .root }}
{{- $v := $root.Values }}
{{- $executes := ne .what "scheduler" }}
{{- $schedules := ne .what "rank" }}
{{- $executorDrain := int $v.executor.drainSeconds }}
{{- $drain := 0 }}
{{- if $schedules }}{{ $drain = add $drain $v.scheduler.drainSeconds }}{{ end }}
{{- if and (eq .what "rank") .waits }}
{{- /* Another rank waits for rank 0, which waits for its scheduler. */}}
{{- $executorDrain = add $executorDrain $v.scheduler.drainSeconds }}
{{- end }}
{{- if $executes }}{{ $drain = add $drain $executorDrain }}{{ end }}
{{- $services := list }}
{{- if $schedules }}{{ $services = append $services "scheduler" }}{{ end }}
{{- if $executes }}{{ $services = append $services "executor" }}{{ end }}
{{- $shm := and $executes (gt (int $v.engine.tpSize) 1) }}
{{- $executor := dict "root" $root "sidecar" $schedules "rank" .rank "rendezvous" .rendezvous "drainSeconds" $executorDrain }}
{{- $scheduler := dict "root" $root "executor" (default "127.0.0.1:50053" .executor) }}
{{- include "triptych.podCommon" $root }}
{{- with $v.engine.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $v.engine.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ include "triptych.grace" (dict "what" "engine" "given" $v.engine.terminationGracePeriodSeconds "needed" (add $drain 10)) }}
{{- $fetches := $v.model.hub.id }}
{{- if or $fetches (and $executes $schedules) }}
initContainers:
  {{- if $fetches }}
  {{- $image := ternary $v.executor.image $v.scheduler.image $executes }}
  {{- include "triptych.fetch" (dict "root" $root "image" $image "weights" $executes) | nindent 2 }}
  {{- end }}
  {{- if and $executes $schedules }}
  {{- include "triptych.executorContainer" $executor | nindent 2 }}
  {{- end }}
{{- end }}
containers:
  {{- if not $schedules }}
  {{- include "triptych.executorContainer" $executor | nindent 2 }}
  {{- else }}
  {{- include "triptych.schedulerContainer" $scheduler | nindent 2 }}
  {{- end }}
volumes:
  {{- include "triptych.volumes" (dict "root" $root "cacheMi" $v.executor.cacheMi "shm" $shm "services" $services) | nindent 2 }}
{{- with $v.engine.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.engine.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := $v.engine.affinity }}
{{- if and .group $v.engine.topologyKey }}
{{- $labels := merge (dict "triptych/engine" .group) (include "triptych.selector" (dict "root" $root "component" "rank") | fromYaml) }}
{{- $term := dict "topologyKey" $v.engine.topologyKey "labelSelector" (dict "matchLabels" $labels) }}
{{- $affinity = mergeOverwrite (deepCopy $affinity) (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term))) }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "triptych.engineTemplate" -}}
metadata:
  labels:
    {{- include "triptych.podLabels" . | nindent 4 }}
    {{- with .root.Values.engine.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .group }}
    triptych/engine: {{ . | quote }}
    {{- end }}
  {{- with .root.Values.engine.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "triptych.enginePod" . | nindent 2 }}
{{- end }}

{{/* Whether an executor of an engine is rank 0 in every pod of its template, and so may tell metrics. */}}
{{- define "triptych.executorTells" -}}
{{- if or (eq .Values.engine.ranksIn "pod") (eq (include "triptych.usesLeaderWorkerSet" .) "true") }}true{{ end }}
{{- end }}

{{- define "triptych.usesLeaderWorkerSet" -}}
{{- if and (eq .Values.engine.ranksIn "pods") .Values.engine.leaderWorkerSet (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") }}true{{ end }}
{{- end }}
