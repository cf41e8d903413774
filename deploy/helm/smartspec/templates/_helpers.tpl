{{- define "smartspec.name" -}}
{{- if contains "smartspec" .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-smartspec" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
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

{{/* Checks of 65 s that take longer than a step may, and than a process that is busy is silent. */}}
{{- define "smartspec.liveTries" -}}
{{- $limits := dig "limits" dict (default dict .Values.engineJson) -}}
{{- $step := float64 (default 120 (get $limits "engine_timeout_s")) -}}
{{- $silence := float64 (default 60 (get $limits "hang_s")) -}}
{{- add 1 (int (floor (divf (maxf $step $silence) 65))) -}}
{{- end -}}

{{/* The sizes of docs/operate/deploy.md. */}}
{{- define "smartspec.sharedMemory" -}}
{{- default (ternary "1Gi" "256Mi" (gt (int .Values.gpu.count) 0)) .Values.sharedMemory -}}
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
