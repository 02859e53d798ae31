{{- define "portolan.selector" -}}
app.kubernetes.io/name: portolan
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "portolan.labels" -}}
{{ include "portolan.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "portolan.image" -}}
{{- $tools := or (has .Values.config.mode (list "iptables" "ipvs")) .Values.legacyIptables -}}
{{- $suffix := ternary "-iptables" "" $tools -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (print .Chart.AppVersion $suffix) }}
{{- end }}

{{/* The port of an address such as 0.0.0.0:10256 or [::]:10256. */}}
{{- define "portolan.port" -}}
{{ regexFind "[0-9]+$" . }}
{{- end }}
