{{/* What a schema cannot say: values that do not go together. Included once, by the frontend's Service. */}}
{{- define "triptych.checks" -}}
{{- $v := .Values }}
{{- $model := $v.model }}
{{- if and (not $model.hub.id) (not $model.volume.path) }}
{{- fail "no model: set model.hub.id to a hub's model, or model.volume.path with a volume that holds a checkpoint" }}
{{- end }}
{{- if and $model.hub.id $model.volume.path }}
{{- fail (printf "model.hub.id is %q and model.volume.path is %q; set one of them" $model.hub.id $model.volume.path) }}
{{- end }}
{{- $sources := list }}
{{- if $model.volume.existingClaim }}{{ $sources = append $sources "existingClaim" }}{{ end }}
{{- if $model.volume.hostPath }}{{ $sources = append $sources "hostPath" }}{{ end }}
{{- if $model.volume.claim.create }}{{ $sources = append $sources "claim.create" }}{{ end }}
{{- if and $model.volume.path (ne (len $sources) 1) }}
{{- fail (printf "model.volume.path is %q with %d volumes (%s); set one of model.volume.existingClaim, hostPath, claim.create" $model.volume.path (len $sources) (join ", " $sources)) }}
{{- end }}
{{- if and $model.hub.id (ne (len $sources) 0) }}
{{- fail (printf "model.volume.%s is set with model.hub.id %q, whose folder is model.hub.cacheClaim's; leave it out" (first $sources) $model.hub.id) }}
{{- end }}
{{- $ranks := include "triptych.ranksOfPod" . | int }}
{{- if and (eq $v.executor.device "cuda") (ne (int $v.executor.gpus) $ranks) }}
{{- fail (printf "executor.gpus is %d, but a pod has %d ranks (engine.tpSize %d, engine.ranksIn %s); each takes one GPU, set %d" (int $v.executor.gpus) $ranks (int $v.engine.tpSize) $v.engine.ranksIn $ranks) }}
{{- end }}
{{- if and (eq $v.executor.device "cpu") (gt (int $v.executor.gpus) 0) }}
{{- fail (printf "executor.gpus is %d, but executor.device is cpu; set 0, or device to cuda" (int $v.executor.gpus)) }}
{{- end }}
{{- if and (eq $v.engine.ranksIn "pods") (lt (int $v.engine.tpSize) 2) }}
{{- fail (printf "engine.ranksIn is pods, but engine.tpSize is %d; one rank stays in its scheduler's pod, set ranksIn to pod" (int $v.engine.tpSize)) }}
{{- end }}
{{- if $v.engine.autoscaling.enabled }}
{{- if and (eq $v.engine.ranksIn "pods") (ne (include "triptych.usesLeaderWorkerSet" .) "true") }}
{{- fail "engine.autoscaling.enabled with engine.ranksIn pods needs a cluster with LeaderWorkerSet, which scales an engine's pods together" }}
{{- end }}
{{- if gt (int $v.engine.autoscaling.minReplicas) (int $v.engine.autoscaling.maxReplicas) }}
{{- fail (printf "engine.autoscaling.minReplicas is %d, over maxReplicas, %d" (int $v.engine.autoscaling.minReplicas) (int $v.engine.autoscaling.maxReplicas)) }}
{{- end }}
{{- if not $v.metrics.enabled }}
{{- fail "engine.autoscaling.enabled needs metrics.enabled: engines are scaled by their waiting requests" }}
{{- end }}
{{- end }}
{{- if $v.frontend.autoscaling.enabled }}
{{- if gt (int $v.frontend.autoscaling.minReplicas) (int $v.frontend.autoscaling.maxReplicas) }}
{{- fail (printf "frontend.autoscaling.minReplicas is %d, over maxReplicas, %d" (int $v.frontend.autoscaling.minReplicas) (int $v.frontend.autoscaling.maxReplicas)) }}
{{- end }}
{{- end }}
{{- $auth := $v.auth }}
{{- if and (eq $auth.method "tokens") (not $auth.tokensSecret.name) }}
{{- fail "auth.method is tokens, but auth.tokensSecret.name is empty; name the secret with the tokens' hashes" }}
{{- end }}
{{- if and (ne $auth.method "tokens") $auth.tokensSecret.name }}
{{- fail (printf "auth.tokensSecret.name is %q, but auth.method is %q; set it to tokens" $auth.tokensSecret.name $auth.method) }}
{{- end }}
{{- if and (ne $auth.method "mtls") $auth.namesSecret.name }}
{{- fail (printf "auth.namesSecret.name is %q, but auth.method is %q; set it to mtls" $auth.namesSecret.name $auth.method) }}
{{- end }}
{{- range $key, $value := $auth.jwt }}
{{- if and (eq $auth.method "jwt") (not $value) }}
{{- fail (printf "auth.method is jwt, but auth.jwt.%s is empty; it needs audience, issuer and keys" $key) }}
{{- end }}
{{- if and (ne $auth.method "jwt") $value }}
{{- fail (printf "auth.jwt.%s is %q, but auth.method is %q; set it to jwt" $key $value $auth.method) }}
{{- end }}
{{- end }}
{{- if and (eq $auth.method "mtls") (not $v.tls.public.clientCertificates) }}
{{- fail "auth.method is mtls, but tls.public.clientCertificates is false; callers are named by their certificates" }}
{{- end }}
{{- if and $v.tls.public.secretName $v.tls.public.certificate.create }}
{{- fail (printf "tls.public.secretName is %q and tls.public.certificate.create is true; set one of them" $v.tls.public.secretName) }}
{{- end }}
{{- if and $v.tls.public.clientCertificates (ne (include "triptych.publicTls" .) "true") }}
{{- fail "tls.public.clientCertificates needs a certificate of the frontend's own; set tls.public.secretName" }}
{{- end }}
{{- if or $v.tls.public.certificate.create $v.tls.internal.certificates.create }}
{{- if ne (include "triptych.certManager" .) "true" }}
{{- fail "tls: certificates are to be made, but the cluster does not serve cert-manager.io/v1; install cert-manager, or name secrets of your own" }}
{{- end }}
{{- if not $v.tls.issuer.name }}
{{- fail "tls.issuer.name is empty; name the issuer of cert-manager that certificates come from" }}
{{- end }}
{{- end }}
{{- if $v.tls.internal.enabled }}
{{- range $service, $secret := $v.tls.internal.secretNames }}
{{- if and (not $secret) (not $v.tls.internal.certificates.create) }}
{{- fail (printf "tls.internal.secretNames.%s is empty; name a secret with tls.crt, tls.key and ca.crt, or set tls.internal.certificates.create" $service) }}
{{- end }}
{{- end }}
{{- else if $v.tls.internal.certificates.create }}
{{- fail "tls.internal.certificates.create needs tls.internal.enabled" }}
{{- end }}
{{- range $name, $on := dict "serviceMonitor" $v.metrics.serviceMonitor.enabled "prometheusRule" $v.metrics.prometheusRule.enabled "dashboards" $v.metrics.dashboards.enabled }}
{{- if and $on (not $v.metrics.enabled) }}
{{- fail (printf "metrics.%s.enabled needs metrics.enabled" $name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The grace of a pod: root, what, given, needed. Fails where what was given is too little. */}}
{{- define "triptych.grace" -}}
{{- if kindIs "invalid" .given }}
{{- .needed }}
{{- else if lt (int .given) (int .needed) }}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, but preStop, drains and 10 s to end take %d; raise it, or lower drainSeconds" .what (int .given) (int .needed)) }}
{{- else }}
{{- .given }}
{{- end }}
{{- end }}
