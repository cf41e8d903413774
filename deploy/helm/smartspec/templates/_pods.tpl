{{- define "smartspec.pod" -}}
metadata:
  labels: {{- include "smartspec.labels" . | nindent 4 }}
  annotations:
    # A changed engine.json needs new pods, because the server reads it only at start.
    checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
spec:
  serviceAccountName: {{ include "smartspec.serviceAccount" . }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ include "smartspec.gracePeriod" . }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext: {{- include "smartspec.podSecurity" . | nindent 4 }}
  containers:
    - name: smartspec
      image: {{ include "smartspec.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- with .Values.tritonArgs }}
      args: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if or .Values.engineJson .Values.apiKeySecret .Values.chatTemplate .Values.cors }}
      env:
        {{- if .Values.engineJson }}
        - { name: SMARTSPEC_ENGINE_JSON, value: /etc/smartspec/engine.json }
        {{- end }}
        {{- with .Values.apiKeySecret }}
        - name: SMARTSPEC_API_KEY
          valueFrom: { secretKeyRef: { name: {{ . }}, key: api-key } }
        {{- end }}
        {{- with .Values.chatTemplate }}
        - { name: SMARTSPEC_CHAT_TEMPLATE, value: {{ quote . }} }
        {{- end }}
        {{- with .Values.cors }}
        - { name: SMARTSPEC_CORS, value: {{ join "," . | quote }} }
        {{- end }}
      {{- end }}
      ports:
        - { name: http, containerPort: 8000 }
        - { name: grpc, containerPort: 8001 }
        - { name: metrics, containerPort: 8002 }
        - { name: openai, containerPort: 9000 }
      # 503 until the model has been loaded.
      startupProbe:
        httpGet: { path: /v2/models/smartspec/ready, port: http }
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add .Values.startupSeconds 4) 5 }}
      # The readiness of the model, not of Triton: Triton stays ready when its model unloads itself.
      readinessProbe:
        httpGet: { path: /v2/models/smartspec/ready, port: http }
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Only a running step loop can answer this request. The entry point exits by itself when a
      # process dies or hangs. The probe finds other failures, and covers images that run plain
      # tritonserver. It fails after limits.engine_timeout_s, because a step on a CPU may be long.
      livenessProbe:
        exec: { command: [python3, /opt/smartspec/healthcheck.py] }
        periodSeconds: 65
        timeoutSeconds: 65
        failureThreshold: {{ include "smartspec.liveTries" . }}
      {{- if .Values.preStopSeconds }}
      lifecycle:
        preStop:
          exec: { command: [sleep, {{ .Values.preStopSeconds | quote }}] }
      {{- end }}
      resources: {{- include "smartspec.resources" . | nindent 8 }}
      securityContext: {{- include "smartspec.containerSecurity" . | nindent 8 }}
      volumeMounts: {{- include "smartspec.mounts" . | nindent 8 }}
  volumes: {{- include "smartspec.volumes" . | nindent 4 }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "smartspec.selector" . | nindent 10 }}
  {{- include "smartspec.placing" . | nindent 2 }}
{{- end -}}

{{- define "smartspec.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "smartspec.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{- define "smartspec.mounts" -}}
- { name: cache, mountPath: /var/cache/smartspec }
- { name: tmp, mountPath: /tmp }
- { name: shared-memory, mountPath: /dev/shm }
{{- if .Values.engineJson }}
- { name: config, mountPath: /etc/smartspec, readOnly: true }
{{- end }}
{{- if .Values.models.existingClaim }}
- { name: models, mountPath: /models, readOnly: true }
{{- if .Values.models.keepsProfiles }}
- { name: models, mountPath: /var/cache/smartspec/profiles, subPath: profiles }
{{- end }}
{{- end }}
{{- end -}}

{{- define "smartspec.volumes" -}}
# Triton's run files, its log, and the measured costs unless models.keepsProfiles is set.
- { name: cache, emptyDir: {} }
- { name: tmp, emptyDir: {} }
- name: shared-memory
  emptyDir: { medium: Memory, sizeLimit: {{ include "smartspec.sharedMemory" . }} }
{{- if .Values.engineJson }}
- name: config
  configMap: { name: {{ include "smartspec.name" . }} }
{{- end }}
{{- if .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: { claimName: {{ .Values.models.existingClaim }}, readOnly: {{ not .Values.models.keepsProfiles }} }
{{- end }}
{{- end -}}

{{- define "smartspec.placing" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
