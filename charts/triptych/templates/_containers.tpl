{{/* A config map's keys as flags, one a line; null leaves a key at its default. */}}
{{- define "triptych.flags" -}}
{{- range $key, $value := . }}
{{- $flag := $key | replace "_" "-" }}
{{- if kindIs "invalid" $value }}
{{- else if kindIs "bool" $value }}
- {{ ternary (printf "--%s" $flag) (printf "--no-%s" $flag) $value | quote }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $flag . | quote }}
{{- end }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | quote }}
{{- else }}
- {{ printf "--%s=%s" $flag ($value | toJson) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Flags of every service: root, service, port, drainSeconds. */}}
{{- define "triptych.commonFlags" -}}
{{- $model := .root.Values.model }}
- {{ printf "--host=%s" .root.Values.listen.host | quote }}
- --port={{ .port }}
- --drain-s={{ .drainSeconds }}
- --log-format={{ .root.Values.logs.format }}
- --log-level={{ .root.Values.logs.level }}
{{- if $model.hub.id }}
- {{ printf "--model=%s" $model.hub.id | quote }}
{{- with $model.hub.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
- --offline
{{- else }}
- {{ printf "--model=/models/%s" (trimPrefix "/" $model.volume.path) | quote }}
{{- end }}
{{- if and .root.Values.metrics.enabled .metricsPort }}
- {{ printf "--metrics-host=%s" .root.Values.listen.host | quote }}
- --metrics-port={{ .metricsPort }}
{{- end }}
{{- with .root.Values.tracing.otlpEndpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
{{- include "triptych.tlsFlags" . }}
{{- end }}

{{/* TLS of a service: root, service. Certificates between services name `FULLNAME-SERVICE`, whatever is dialled. */}}
{{- define "triptych.tlsFlags" -}}
{{- $tls := .root.Values.tls }}
{{- $full := include "triptych.fullname" .root }}
{{- $folder := "/etc/triptych/tls" }}
{{- if eq .service "frontend" }}
{{- if eq (include "triptych.publicTls" .root) "true" }}
- --tls-cert={{ $folder }}/public/tls.crt
- --tls-key={{ $folder }}/public/tls.key
{{- if $tls.public.clientCertificates }}
- --tls-client-ca={{ $folder }}/public/ca.crt
{{- end }}
{{- end }}
{{- else if $tls.internal.enabled }}
- --tls-cert={{ $folder }}/internal/tls.crt
- --tls-key={{ $folder }}/internal/tls.key
- --tls-client-ca={{ $folder }}/internal/ca.crt
- --tls-client-names={{ $full }}-{{ ternary "frontend" "scheduler" (eq .service "scheduler") }}
{{- end }}
{{- if and $tls.internal.enabled (ne .service "executor") }}
- --peer-ca={{ $folder }}/internal/ca.crt
- --peer-cert={{ $folder }}/internal/tls.crt
- --peer-key={{ $folder }}/internal/tls.key
- --peer-server-name={{ $full }}-{{ ternary "scheduler" "executor" (eq .service "frontend") }}
{{- end }}
{{- if eq (include "triptych.speaksTls" .) "true" }}
- --health-port={{ include "triptych.healthPort" . }}
{{- end }}
{{- end }}

{{/* Of the frontend: how callers show who they are. */}}
{{- define "triptych.authFlags" -}}
{{- $auth := .Values.auth }}
{{- with $auth.method }}
- --auth={{ . }}
{{- end }}
{{- if $auth.tokensSecret.name }}
- {{ printf "--auth-tokens=/etc/triptych/auth/%s" $auth.tokensSecret.key | quote }}
{{- end }}
{{- if $auth.namesSecret.name }}
- {{ printf "--auth-names=/etc/triptych/auth/%s" $auth.namesSecret.key | quote }}
{{- end }}
{{- range $key, $value := $auth.jwt }}
{{- if $value }}
- {{ printf "--jwt-%s=%s" $key $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "triptych.publicTls" -}}
{{- if or .Values.tls.public.secretName (and .Values.tls.public.certificate.create (eq (include "triptych.certManager" .) "true")) }}true{{ end }}
{{- end }}

{{- define "triptych.certManager" -}}
{{- .Capabilities.APIVersions.Has "cert-manager.io/v1" }}
{{- end }}

{{- define "triptych.speaksTls" -}}
{{- if eq .service "frontend" }}{{ include "triptych.publicTls" .root }}{{ else }}{{ .root.Values.tls.internal.enabled }}{{ end }}
{{- end }}

{{/* The port that kubelet asks: one of its own where the service speaks TLS, which kubelet cannot. */}}
{{- define "triptych.healthPort" -}}
{{- $port := get (dict "frontend" 50051 "scheduler" 50052 "executor" 50053) .service }}
{{- if eq (include "triptych.speaksTls" .) "true" }}{{ add $port 100 }}{{ else }}{{ $port }}{{ end }}
{{- end }}

{{- define "triptych.tlsMounts" -}}
{{- if and (eq .service "frontend") (eq (include "triptych.publicTls" .root) "true") }}
- name: tls-public
  mountPath: /etc/triptych/tls/public
  readOnly: true
{{- end }}
{{- if and (eq .service "frontend") (include "triptych.authSecret" .root) }}
- name: auth
  mountPath: /etc/triptych/auth
  readOnly: true
{{- end }}
{{- if .root.Values.tls.internal.enabled }}
- name: tls-{{ .service }}
  mountPath: /etc/triptych/tls/internal
  readOnly: true
{{- end }}
{{- end }}

{{- define "triptych.authSecret" -}}
{{- default .Values.auth.namesSecret.name .Values.auth.tokensSecret.name }}
{{- end }}

{{/* Volumes of certificates and of who may call: root, services of the pod. */}}
{{- define "triptych.tlsVolumes" -}}
{{- $root := .root }}
{{- $full := include "triptych.fullname" $root }}
{{- if and (has "frontend" .services) (eq (include "triptych.publicTls" $root) "true") }}
- name: tls-public
  secret:
    secretName: {{ default (printf "%s-public-tls" $full) $root.Values.tls.public.secretName }}
    defaultMode: 0440
{{- end }}
{{- if and (has "frontend" .services) (include "triptych.authSecret" $root) }}
- name: auth
  secret:
    secretName: {{ include "triptych.authSecret" $root }}
    defaultMode: 0440
{{- end }}
{{- if $root.Values.tls.internal.enabled }}
{{- range .services }}
- name: tls-{{ . }}
  secret:
    secretName: {{ default (printf "%s-%s-tls" $full .) (get $root.Values.tls.internal.secretNames .) }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{- define "triptych.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  privileged: false
  capabilities:
    drop: [ALL]
{{- end }}

{{/* Probes of a container: port; startup: health name that ends the start, startupSeconds. */}}
{{- define "triptych.probes" -}}
startupProbe:
  grpc:
    port: {{ .port }}
    service: {{ .startup }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .startupSeconds) 4) 5 }}
  terminationGracePeriodSeconds: 10
livenessProbe:
  grpc:
    port: {{ .port }}
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
  terminationGracePeriodSeconds: 10
readinessProbe:
  grpc:
    port: {{ .port }}
    service: readiness
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{- define "triptych.mounts" -}}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: cache
    mountPath: /cache
  {{- if .root.Values.model.hub.id }}
  - name: models
    mountPath: /cache/huggingface
    {{- if not .fetches }}
    readOnly: true
    {{- end }}
  {{- else }}
  - name: models
    mountPath: /models
    readOnly: true
  {{- end }}
  {{- if .shm }}
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  {{- with .service }}
  {{- include "triptych.tlsMounts" $ | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Volumes of a pod: root, cacheMi, shm, services. */}}
{{- define "triptych.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: cache
  emptyDir:
    sizeLimit: {{ .cacheMi }}Mi
{{- $model := .root.Values.model }}
- name: models
  {{- if and $model.hub.id $model.hub.cacheClaim }}
  persistentVolumeClaim:
    claimName: {{ $model.hub.cacheClaim }}
  {{- else if $model.hub.id }}
  emptyDir:
    sizeLimit: {{ $model.hub.cacheMi }}Mi
  {{- else if $model.volume.hostPath }}
  hostPath:
    path: {{ $model.volume.hostPath }}
    type: Directory
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "triptych.fullname" .root)) $model.volume.existingClaim }}
    readOnly: true
  {{- end }}
{{- if .shm }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .root.Values.executor.shmMi }}Mi
{{- end }}
{{- include "triptych.tlsVolumes" . }}
{{- end }}

{{/* Fetches the hub's model, the only one that sees the token: root, image, weights. */}}
{{- define "triptych.fetch" -}}
{{- $hub := .root.Values.model.hub }}
- name: fetch-model
  image: {{ include "triptych.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [triptych]
  args:
    - model
    - fetch
    - {{ $hub.id | quote }}
    {{- with $hub.revision }}
    - {{ printf "--revision=%s" . | quote }}
    {{- end }}
    {{- if not .weights }}
    - --without-weights
    {{- end }}
  {{- if or $hub.endpoint $hub.tokenSecret.name }}
  env:
    {{- with $hub.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- if $hub.tokenSecret.name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ $hub.tokenSecret.name }}
          key: {{ $hub.tokenSecret.key }}
    {{- end }}
  {{- end }}
  resources:
    requests:
      cpu: 500m
      memory: 1024Mi
    limits:
      memory: 1024Mi
  {{- include "triptych.containerSecurity" . | nindent 2 }}
  {{- include "triptych.mounts" (dict "root" .root "fetches" true) | nindent 2 }}
{{- end }}

{{/* Fields that the pods of all services have. */}}
{{- define "triptych.podCommon" -}}
serviceAccountName: {{ include "triptych.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- $context := dict }}
  {{- range $key, $value := .Values.podSecurityContext }}
  {{- if not (kindIs "invalid" $value) }}{{ $_ := set $context $key $value }}{{ end }}
  {{- end }}
  {{- toYaml $context | nindent 2 }}
{{- end }}

{{/* preStop that waits: an action of its own since Kubernetes 1.30, before that the image's `sleep`. */}}
{{- define "triptych.preStop" -}}
preStop:
  {{- if semverCompare ">=1.30-0" .root.Capabilities.KubeVersion.Version }}
  sleep:
    seconds: {{ .seconds }}
  {{- else }}
  exec:
    command: [sleep, {{ .seconds | quote }}]
  {{- end }}
{{- end }}

{{/* The frontend's container, which dials every engine by its name. */}}
{{- define "triptych.frontendContainer" -}}
{{- $f := .root.Values.frontend }}
- name: frontend
  image: {{ include "triptych.image" (dict "root" .root "image" $f.image) | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    {{- include "triptych.commonFlags" (dict "root" .root "service" "frontend" "port" 50051 "metricsPort" 9101 "drainSeconds" $f.drainSeconds) | nindent 4 }}
    {{- $root := .root }}
    {{- range $index := until (include "triptych.mostEngines" .root | int) }}
    {{- $flag := ternary "more-engines" "engine" (gt $index 0) }}
    - {{ printf "--%s=%s:50052" $flag (include "triptych.engineHost" (dict "root" $root "index" $index)) | quote }}
    {{- end }}
    - --workers={{ $f.workers }}
    {{- with .root.Values.model.servedName }}
    - {{ printf "--served-model-name=%s" . | quote }}
    {{- end }}
    {{- range .root.Values.model.aliases }}
    - {{ printf "--served-model-alias=%s" . | quote }}
    {{- end }}
    {{- include "triptych.authFlags" .root | nindent 4 }}
    {{- include "triptych.flags" $f.config | nindent 4 }}
  {{- with $f.extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - name: grpc
      containerPort: 50051
    {{- if .root.Values.metrics.enabled }}
    - name: metrics-front
      containerPort: 9101
    {{- end }}
  {{- include "triptych.probes" (dict "port" (include "triptych.healthPort" (dict "root" .root "service" "frontend")) "startup" "readiness" "startupSeconds" $f.startupSeconds) | nindent 2 }}
  lifecycle:
    {{- include "triptych.preStop" (dict "root" .root "seconds" $f.preStopSeconds) | nindent 4 }}
  resources:
    requests:
      cpu: {{ $f.workers }}
      memory: {{ $f.memoryMi }}Mi
    limits:
      memory: {{ $f.memoryMi }}Mi
  {{- include "triptych.containerSecurity" . | nindent 2 }}
  {{- include "triptych.mounts" (dict "root" .root "service" "frontend") | nindent 2 }}
{{- end }}

{{/* The scheduler's container: root, executor: HOST:PORT that it dials. */}}
{{- define "triptych.schedulerContainer" -}}
{{- $s := .root.Values.scheduler }}
- name: scheduler
  image: {{ include "triptych.image" (dict "root" .root "image" $s.image) | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    {{- include "triptych.commonFlags" (dict "root" .root "service" "scheduler" "port" 50052 "metricsPort" 9102 "drainSeconds" $s.drainSeconds) | nindent 4 }}
    - {{ printf "--executor=%s" .executor | quote }}
    - --tp-size={{ .root.Values.engine.tpSize }}
    {{- include "triptych.flags" $s.config | nindent 4 }}
  {{- $indexed := contains "$(POD_INDEX)" .executor }}
  {{- if or $indexed $s.extraEnv }}
  env:
    {{- if $indexed }}
    {{- include "triptych.podIndex" . | nindent 4 }}
    {{- end }}
    {{- with $s.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    - name: engine
      containerPort: 50052
    {{- if .root.Values.metrics.enabled }}
    - name: metrics-sched
      containerPort: 9102
    {{- end }}
  {{- /* A start ends with the first token: the next engine of a rollout waits for this one's weights. */}}
  {{- include "triptych.probes" (dict "port" (include "triptych.healthPort" (dict "root" .root "service" "scheduler")) "startup" "generate" "startupSeconds" .root.Values.engine.startupSeconds) | nindent 2 }}
  resources:
    requests:
      cpu: {{ $s.cpus }}
      memory: {{ $s.memoryMi }}Mi
    limits:
      memory: {{ $s.memoryMi }}Mi
  {{- include "triptych.containerSecurity" . | nindent 2 }}
  {{- include "triptych.mounts" (dict "root" .root "service" "scheduler") | nindent 2 }}
{{- end }}

{{- define "triptych.podIndex" -}}
- name: POD_INDEX
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
{{- end }}

{{/* Ranks that share a pod. */}}
{{- define "triptych.ranksOfPod" -}}
{{- if eq .Values.engine.ranksIn "pods" }}1{{ else }}{{ .Values.engine.tpSize }}{{ end }}
{{- end }}

{{/* The executor's container: root; sidecar: it ends last; rank and rendezvous where it is one rank of several pods. */}}
{{- define "triptych.executorContainer" -}}
{{- $e := .root.Values.executor }}
{{- $ranks := include "triptych.ranksOfPod" .root | int }}
{{- $tp := gt (int .root.Values.engine.tpSize) 1 }}
{{- /* Rank 0 tells the metrics of all ranks; where ranks share a template, none can. */}}
{{- $metricsPort := ternary 9103 0 (and .sidecar .root.Values.metrics.enabled) }}
{{- $cpus := mul $ranks (int $e.cpusPerRank) }}
{{- $memory := add (int $e.memoryMi) (ternary (int $e.shmMi) 0 $tp) }}
- name: executor
  image: {{ include "triptych.image" (dict "root" .root "image" $e.image) | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- if .sidecar }}
  restartPolicy: Always
  {{- end }}
  args:
    {{- include "triptych.commonFlags" (dict "root" .root "service" "executor" "port" 50053 "metricsPort" $metricsPort "drainSeconds" .drainSeconds) | nindent 4 }}
    - --device={{ $e.device }}
    - --tp-size={{ .root.Values.engine.tpSize }}
    {{- if .rank }}
    - --tp-rank={{ .rank }}
    - --tp-rendezvous={{ .rendezvous }}
    {{- end }}
    {{- include "triptych.flags" $e.config | nindent 4 }}
  env:
    {{- if contains "$(POD_INDEX)" (default "" .rank) }}
    {{- include "triptych.podIndex" . | nindent 4 }}
    {{- end }}
    # Where all that is compiled or kept goes: to a folder that the user of the pod may write to.
    - name: TRIPTYCH_CACHE
      value: /cache/triptych
    - name: CUPY_CACHE_DIR
      value: /cache/cupy
    {{- with $e.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: executor
      containerPort: 50053
    {{- if $metricsPort }}
    - name: metrics-exec
      containerPort: 9103
    {{- end }}
  {{- /* It is ready before any weight is loaded: its scheduler has them loaded. */}}
  {{- include "triptych.probes" (dict "port" (include "triptych.healthPort" (dict "root" .root "service" "executor")) "startup" "liveness" "startupSeconds" .root.Values.engine.startupSeconds) | nindent 2 }}
  resources:
    requests:
      cpu: {{ $cpus }}
      memory: {{ $memory }}Mi
      {{- if gt (int $e.gpus) 0 }}
      {{ $e.gpuResource }}: {{ $e.gpus }}
      {{- end }}
    limits:
      {{- if eq $e.device "cpu" }}
      cpu: {{ $cpus }}
      {{- end }}
      memory: {{ $memory }}Mi
      {{- if gt (int $e.gpus) 0 }}
      {{ $e.gpuResource }}: {{ $e.gpus }}
      {{- end }}
  {{- include "triptych.containerSecurity" . | nindent 2 }}
  {{- include "triptych.mounts" (dict "root" .root "service" "executor" "shm" $tp) | nindent 2 }}
{{- end }}
