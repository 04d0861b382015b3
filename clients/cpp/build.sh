#!/bin/sh
# Generates the stubs with protoc and builds ./build/chat, against the C++ libraries that Debian packages:
#   apt-get install g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
set -eu
cd "$(dirname "$0")"
mkdir -p build/src
protoc -I ../../proto --cpp_out=build/src --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin --grpc_out=build/src \
	triptych/inference/v1/generation.proto triptych/inference/v1/inference.proto
g++ -std=c++17 -O1 -Wall -Wextra -Wno-unused-parameter -Ibuild/src -o build/chat chat.cc \
	build/src/triptych/inference/v1/*.cc $(pkg-config --cflags --libs grpc++ protobuf) -pthread
