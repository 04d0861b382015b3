#!/bin/sh
# Generates the stubs with protoc and builds ./build, which ./chat runs, against the Java libraries that Debian packages:
#   apt-get install default-jdk-headless libgrpc-java libnetty-java libperfmark-java libgeronimo-annotation-1.3-spec-java
#   apt-get install protobuf-compiler protobuf-compiler-grpc-java-plugin
set -eu
cd "$(dirname "$0")"
. ./classpath
rm -rf build
mkdir -p build/src build/classes
protoc -I ../../proto --java_out=build/src --plugin=protoc-gen-grpc-java=/usr/bin/grpc_java_plugin \
	--grpc-java_out=build/src triptych/inference/v1/generation.proto triptych/inference/v1/inference.proto
javac -nowarn -encoding UTF-8 -cp "$classpath" -d build/classes Chat.java build/src/triptych/inference/v1/*.java
