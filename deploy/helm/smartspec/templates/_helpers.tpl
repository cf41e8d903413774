{{- define "smartspec.name" -}}
{{- if contains "smartspec" .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-smartspec" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The Deployment, or the LeaderWorkerSet. The controller of the latter makes a Service of the same
name for the addresses of the pods, so it must differ from the name of the chart's Service. */}}
{{- define "smartspec.workload" -}}
{{- $name := include "smartspec.name" . -}}
{{- gt (int .Values.multiNode.size) 1 | ternary (printf "%s-nodes" (trunc 57 $name)) $name -}}
{{- end -}}

{{- define "smartspec.selector" -}}
app.kubernetes.io/name: smartspec
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "smartspec.labels" -}}
{{ include "smartspec.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "smartspec.image" -}}
{{- $default := ternary "gpu" "cpu" (gt (int .Values.gpu.count) 0) -}}
{{- printf "%s:%s" .Values.image.repository (default $default .Values.image.tag) -}}
{{- end -}}

{{- define "smartspec.serviceAccount" -}}
{{- default (include "smartspec.name" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* Fails if a pod would be killed during its drain. 20 s: time for the last responses of the
backend and for Triton to exit. */}}
{{- define "smartspec.gracePeriod" -}}
{{- $limits := dig "limits" dict (default dict .Values.engineJson) -}}
{{- $drain := ceil (float64 (default 20 (get $limits "drain_s"))) -}}
{{- $least := int (addf $drain .Values.preStopSeconds 20) -}}
{{- if lt (int .Values.terminationGracePeriodSeconds) $least -}}
{{- fail (printf "terminationGracePeriodSeconds: got %d, must be at least %d: preStopSeconds, limits.drain_s and 20" (int .Values.terminationGracePeriodSeconds) $least) -}}
{{- end -}}
{{- .Values.terminationGracePeriodSeconds -}}
{{- end -}}

{{/* The sizes of deploy/README.md. */}}
{{- define "smartspec.sharedMemory" -}}
{{- default (ternary "1Gi" "256Mi" (gt (int .Values.gpu.count) 0)) .Values.sharedMemory -}}
{{- end -}}

{{- define "smartspec.checkMultiNode" -}}
{{- $size := int .Values.multiNode.size -}}
{{- if lt (int .Values.gpu.count) 1 -}}
{{- fail (printf "gpu.count: got %d, must be at least 1 if multiNode.size is above 1" (int .Values.gpu.count)) -}}
{{- end -}}
{{- if not .Values.multiNode.sshKeySecret -}}
{{- fail "multiNode.sshKeySecret: missing, must name a Secret if multiNode.size is above 1" -}}
{{- end -}}
{{- $nodes := dig "engine" "num_nodes" 1 (default dict .Values.engineJson) -}}
{{- if and .Values.engineJson (ne (int $nodes) $size) -}}
{{- fail (printf "engineJson.engine.num_nodes: got %d, must be multiNode.size %d" (int $nodes) $size) -}}
{{- end -}}
{{- end -}}

{{/* The resources of the values, plus the GPUs, which Kubernetes requires as a limit. */}}
{{- define "smartspec.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- $gpus := dict .Values.gpu.resourceName (int .Values.gpu.count) -}}
{{- $resources = mergeOverwrite $resources (dict "limits" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
