#!/bin/sh
# Generates the stubs with protoc and builds ./build/chat, against the Go libraries that Debian packages:
#   apt-get install golang-go golang-google-grpc-dev golang-google-protobuf-dev
#   apt-get install golang-github-golang-protobuf-1-5-dev protobuf-compiler protoc-gen-go protoc-gen-go-grpc
set -eu
cd "$(dirname "$0")"
package=triptych/inferencev1
map=Mtriptych/inference/v1/inference.proto=$package,Mtriptych/inference/v1/generation.proto=$package
mkdir -p build/src
protoc -I ../../proto --go_out=build/src --go_opt="$map" --go-grpc_out=build/src --go-grpc_opt="$map" \
	triptych/inference/v1/generation.proto triptych/inference/v1/inference.proto
GO111MODULE=off GOPATH="$PWD/build:/usr/share/gocode" go build -o build/chat chat.go
